"""What the peers choose on the same tasks, how long they take, and how fast their choices train.

    pip install 'autoprec[peers]'
    python benchmarks/peers.py --tasks mlp gpt

Each peer searches in a process of its own, under the same memory limit, as its documentation says:
Lightning's `Tuner.scale_batch_size` with bf16-mixed, accelerate's `find_executable_batch_size` with
bf16 from the largest batch of our own space, pytorch-autotune at the user's batch, `autoprec tune`,
and two that search nothing: plain float32 and bfloat16 autocast at the user's batch of 32. Then all
choices train in alternation, measured the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.statistics import paired_ratio

TASKS = Path(__file__).parent / "tasks"
RESULTS = Path(__file__).parent / "results"
USERS_BATCH, LARGEST = 32, 1024
STEPS = 3
_SAMPLED_SECONDS = 0.1
FIXED = "no search: the task names its batch"


def load(task: str) -> Any:
    """The task file as a module."""
    from autoprec.tuning.taskfile import load_task

    return load_task(TASKS / f"{task}.py")


def optimizer_of(task: Any, model: Any) -> Any:
    """The task's optimizer, or what autoprec takes where there is none."""
    import torch

    if task.build_optimizer is not None:
        return task.build_optimizer(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# The peers: each returns its choice and a note ---------------------------------------------------


def plain(task: str) -> tuple[Recipe, str]:
    return Recipe(batch_size=USERS_BATCH), "no search"


def autocast(task: str) -> tuple[Recipe, str]:
    return Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=USERS_BATCH), "no search"


def lightning(task: str) -> tuple[Recipe, str]:
    """`Tuner.scale_batch_size`, doubling from the user's batch."""
    loaded = load(task)
    if loaded.batch_size is not None:
        return autocast(task)[0], FIXED
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, IterableDataset

    class Endless(IterableDataset):  # type: ignore[misc,type-arg]
        def __init__(self, size: int) -> None:
            self.size = size

        def __iter__(self) -> Iterator[Any]:
            return iter(loaded.build_data(self.size))

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = USERS_BATCH
            self.model = loaded.build_model()

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            return loaded.loss_fn(self.model(inputs), targets)

        def train_dataloader(self) -> Any:
            trying(self.batch_size)
            return DataLoader(Endless(self.batch_size), batch_size=None)

        def configure_optimizers(self) -> Any:
            return optimizer_of(loaded, self.model)

    trainer = pl.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    found = Tuner(trainer).scale_batch_size(
        Module(), mode="power", steps_per_trial=STEPS, init_val=USERS_BATCH
    )
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=found)
    return recipe, "the largest that ran, of up to 8192"


def accelerate(task: str) -> tuple[Recipe, str]:
    """`find_executable_batch_size` around a few steps, from the largest batch."""
    loaded = load(task)
    if loaded.batch_size is not None:
        return autocast(task)[0], FIXED
    import torch
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)

    @find_executable_batch_size(starting_batch_size=LARGEST)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        trying(batch_size)
        accelerator.free_memory()
        torch.manual_seed(0)
        model = loaded.build_model()
        model, optimizer = accelerator.prepare(model, optimizer_of(loaded, model))
        stream = iter(loaded.build_data(batch_size))
        for _ in range(STEPS):
            inputs, targets = next(stream)
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = loaded.loss_fn(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        return batch_size

    return Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=train()), "the first that ran"


def autotune(task: str) -> tuple[Recipe, str]:
    """pytorch-autotune's measured search at the user's batch."""
    import torch
    from pytorch_autotune import autotune as search

    loaded = load(task)
    torch.manual_seed(0)
    batch = next(iter(loaded.build_data(USERS_BATCH)))
    spec: Any = "adamw"
    if loaded.build_optimizer is not None:
        spec = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # noqa: E731
    with contextlib.redirect_stdout(sys.stderr):
        found = search(
            loaded.build_model(),
            batch,
            loss_fn=loaded.loss_fn,
            optimizer=spec,
            device="cpu",
            budget=60,
            cache=False,
        ).config
    policies = {"amp_bf16": Policy.MIXED_BFLOAT16, "amp_fp16": Policy.MIXED_FLOAT16}
    knobs: dict[str, Any] = {"fused_optimizer": True} if found.fused_opt else {}
    if found.compile not in ("off", "default"):
        knobs["compile_mode"] = found.compile
    recipe = Recipe(
        batch_size=USERS_BATCH,
        memory_format="channels_last" if found.channels_last else "contiguous",
        compile=found.compile != "off",
        knobs=knobs,
    )
    policy = policies.get(found.precision, Policy.FLOAT32)
    scaled = recipe.with_policy(policy)
    return scaled, found.label


def ours(task: str) -> tuple[Recipe, str]:
    """`autoprec tune`, from scratch."""
    from autoprec.api import tune

    with tempfile.TemporaryDirectory() as folder:
        profile = tune(
            TASKS / f"{task}.py",
            device="cpu",
            output=Path(folder) / "profile.yaml",
            storage=str(Path(folder) / "study.journal"),
        )
    return replace(profile.recipe, forced=False), profile.evidence.reason.split(" (")[0]


PEERS: dict[str, Callable[[str], tuple[Recipe, str]]] = {
    "float32": plain,
    "bf16 autocast": autocast,
    "lightning": lightning,
    "accelerate": accelerate,
    "pytorch-autotune": autotune,
    "autoprec": ours,
}
TRIED: list[int] = []


def search_here(peer: str, task: str, memory: int) -> dict[str, Any]:
    """Run one peer's search in this process."""
    if peer != "autoprec":  # which limits its own workers
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    began = time.monotonic()
    found: dict[str, Any] = {}
    try:
        recipe, found["note"] = PEERS[peer](task)
        found["recipe"] = to_plain(recipe)
    except Exception as error:  # a peer that fails is a result
        found["note"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return {**found, "seconds": time.monotonic() - began, "tried": TRIED}


def search_apart(peer: str, task: str, memory: int, limit: float) -> dict[str, Any]:
    """Run one peer's search in a process of its own; a crash or a hang is a result too.

    `limit` are the seconds a peer may search; autoprec's own search has no limit.
    """
    command = [sys.executable, __file__, "--one", peer, "--tasks", task, "--memory", str(memory)]
    until = math.inf if peer == "autoprec" else time.monotonic() + limit
    peak = 0
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as told:
        child = subprocess.Popen(command, stdout=told, stderr=said)
        while child.poll() is None and time.monotonic() < until:
            peak = max(peak, resident_bytes(child.pid))
            time.sleep(_SAMPLED_SECONDS)
        memory_used = {"peak_memory_bytes": peak} if peak else {}  # only Linux tells
        if child.returncode is None:
            child.kill()
            child.wait()
            said.seek(0)
            return {**unfinished(said.read(), limit), **memory_used}
        said.seek(0)
        told.seek(0)
        errors, lines = said.read().strip().splitlines(), told.read().strip().splitlines()
    if child.returncode or not lines:
        why = (errors or [""])[-1][:160]
        note = f"ended with code {child.returncode}: {why}"
        return {"note": note, "seconds": None, **memory_used}
    return {**json.loads(lines[-1]), **memory_used}


def resident_bytes(process: int) -> int:
    """Main memory that a process and all its descendants hold now; shared pages count in each.

    A worker that is killed tells its parent nothing, so the parent's own figures do not do.
    """
    folder = Path(f"/proc/{process}")
    try:
        own = int((folder / "statm").read_text().split()[1]) * resource.getpagesize()
        children = " ".join(p.read_text() for p in folder.glob("task/*/children")).split()
    except (OSError, IndexError):  # it has just ended
        return 0
    return own + sum(resident_bytes(int(child)) for child in children)


def unfinished(said: str, limit: float) -> dict[str, Any]:
    """A search that was cut: its choice is the last batch after which it tried a larger one."""
    tried = [int(line.split()[1]) for line in said.splitlines() if line.startswith("tried ")]
    passed = [size for size, after in pairwise(tried) if after > size]
    found: dict[str, Any] = {"note": f"not finished in {limit:.0f} s", "tried": tried}
    if passed:
        recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=passed[-1])
        found |= {"recipe": to_plain(recipe)}
        found["note"] += f"; batch {passed[-1]} had passed"
    return {**found, "seconds": limit}


def trying(batch: int) -> None:
    """Note that a peer tries a batch, for the parent process too."""
    TRIED.append(batch)
    print(f"tried {batch}", file=sys.stderr, flush=True)


def compare(
    task: str, peers: Sequence[str], rounds: int, limit: float, folder: Path
) -> dict[str, Any]:
    """Every peer's search, then all choices in alternation."""
    from alternation import alternate
    from oracle import make_work

    work, _ = make_work(TASKS / f"{task}.py", folder)
    found = {}
    for peer in peers:
        found[peer] = search_apart(peer, task, work.memory_bytes or 2**62, limit)
        print(f"  {peer}: {describe(found[peer])}", flush=True)
    chosen = {p: from_plain(Recipe, r["recipe"]) for p, r in found.items() if "recipe" in r}
    rates: dict[str, list[float]] = {}
    while True:
        try:
            peaks = {r.key(): found[p].get("peak_memory_bytes", 2**62) for p, r in chosen.items()}
            rates = alternate(work, list(chosen.values()), peaks, rounds)
            break
        except Exception as error:  # a choice that does not train is the peer's result
            recipe = getattr(error, "recipe", None)
            if recipe is None:
                raise
            for peer in [p for p, r in chosen.items() if r.key() == recipe.key()]:
                found[peer]["note"] += f"; its choice does not train: {str(error)[:120]}"
                del chosen[peer]
    own = rates[chosen["autoprec"].key()]
    for peer, recipe in chosen.items():
        found[peer]["rates"] = rates[recipe.key()]
        found[peer]["ours_over"] = to_plain(paired_ratio(own, rates[recipe.key()]))
    best = min(
        (found[p]["ours_over"]["ratio"] for p in chosen if p != "autoprec"), default=math.nan
    )
    return {"task": task, "peers": found, "ours_over_best_peer": best}


def describe(result: dict[str, Any]) -> str:
    """A peer's search in a line."""
    recipe = result.get("recipe")
    choice = "nothing" if recipe is None else f"{recipe['policy']}, batch {recipe['batch_size']}"
    seconds = result.get("seconds")
    time_taken = "" if seconds is None else f" in {seconds:.0f} s"
    peak = result.get("peak_memory_bytes")
    memory = "" if peak is None else f", peak {peak / 2**30:.1f} GiB"
    return f"{choice}{time_taken}{memory} ({result['note']})"


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(p.stem for p in TASKS.glob("*.py") if not p.stem.startswith("keras"))
    parser.add_argument("--tasks", nargs="+", default=known, choices=known)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a peer may search")
    parser.add_argument("--one", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not arguments.one and "autoprec" not in arguments.peers:
        parser.error("--peers: name autoprec too, for it is what the others are compared with")
    if arguments.one:
        warnings.simplefilter("ignore")
        print(json.dumps(search_here(arguments.one, arguments.tasks[0], arguments.memory)))
        return
    from oracle import machine

    packages = ("lightning", "accelerate", "pytorch-autotune")
    head = {**machine(), **{name: version(name) for name in packages}}
    output = arguments.output or RESULTS / f"peers-{head['date']}-{head['family']}.jsonl"
    output.write_text("")
    results = []
    for task in arguments.tasks:
        print(task, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            result = compare(task, arguments.peers, arguments.rounds, arguments.limit, Path(folder))
        results.append(result)
        with output.open("a") as file:
            file.write(json.dumps({**head, **result}) + "\n")
        for peer, found in result["peers"].items():
            if "ours_over" in found and peer != "autoprec":
                ratio = found["ours_over"]
                print(
                    f"  autoprec / {peer}: {ratio['ratio']:.2f}x "
                    f"({ratio['low']:.2f}-{ratio['high']:.2f})",
                    flush=True,
                )
    best = [result["ours_over_best_peer"] for result in results]
    mean = math.exp(sum(math.log(value) for value in best) / len(best))
    print(f"autoprec over the best peer's choice: {mean:.3f} in the mean, worst {min(best):.3f}")


if __name__ == "__main__":
    main()
