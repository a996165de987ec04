"""The searches that autoprec is compared with, each in a process of its own.

    python -m benchmarks.peers.searches lightning mlp --memory 8000000000 --limit 240

Each searches as its documentation says, with the task's own optimizer: Lightning's
`Tuner.scale_batch_size` with bf16-mixed, accelerate's `find_executable_batch_size` with bf16 from
the largest batch of our own space, pytorch-autotune at the user's batch, `autoprec tune`, and two
that search nothing: plain float32 and bfloat16 autocast at the user's batch. The process of a rival
keeps its freed memory from its start, as the environment says (`KEPT`); autoprec's does not.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.workers.task_file import load_task
from benchmarks.checkout import TASKS, child_environment
from benchmarks.peers.rows import OURS, OURS_AT_THE_BATCH, OWN

USERS_BATCH, LARGEST = 32, 1024
STEPS = 3
FIXED = "no search: the task names its batch"

#: What makes glibc keep freed memory from a process's start (mallopt(3)).
KEPT: Mapping[str, str] = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}

#: Seconds after the limit at which any search is ended; those that take a limit keep to it.
GRACE = 10.0
_SAMPLED_SECONDS = 0.1

#: The batches that this process tried so far.
TRIED: list[int] = []


def load(task: str) -> Any:
    """The task file as a module."""
    return load_task(TASKS / f"{task}.py")


def optimizer_of(task: Any, model: Any) -> Any:
    """The task's optimizer, or what autoprec takes where there is none."""
    import torch

    if task.build_optimizer is not None:
        return task.build_optimizer(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def optimizer_like(made: Any) -> Callable[[Any], Any]:
    """What makes an optimizer of the same class and settings for other parameters.

    For those that are given parameters and no model. `ValueError` where the groups differ, for
    then it is the model that tells them apart.
    """
    settings = inspect.signature(type(made)).parameters
    groups = [
        {n: v for n, v in g.items() if n in settings and n != "params"} for g in made.param_groups
    ]
    if any(group != groups[0] for group in groups):
        raise ValueError("the optimizer's groups have settings of their own")
    return lambda parameters: type(made)(parameters, **groups[0])


# Each returns its choice and a note ---------------------------------------------------------------


def plain(task: str, limit: float) -> tuple[Recipe, str]:
    return Recipe(batch_size=USERS_BATCH), "no search"


def autocast(task: str, limit: float) -> tuple[Recipe, str]:
    return Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=USERS_BATCH), "no search"


def lightning(task: str, limit: float) -> tuple[Recipe, str]:
    """`Tuner.scale_batch_size`, doubling from the user's batch."""
    loaded = load(task)
    if loaded.batch_size is not None:
        return autocast(task, limit)[0], FIXED
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


def accelerate(task: str, limit: float) -> tuple[Recipe, str]:
    """`find_executable_batch_size` around a few steps, from the largest batch."""
    loaded = load(task)
    if loaded.batch_size is not None:
        return autocast(task, limit)[0], FIXED
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


def autotune(task: str, limit: float) -> tuple[Recipe, str]:
    """pytorch-autotune's measured search at the user's batch."""
    import torch
    from pytorch_autotune import autotune as search

    loaded = load(task)
    torch.manual_seed(0)
    model = loaded.build_model()
    batch = next(iter(loaded.build_data(USERS_BATCH)))
    with contextlib.redirect_stdout(sys.stderr):
        found = search(
            model,
            batch,
            loss_fn=loaded.loss_fn,
            optimizer=optimizer_like(optimizer_of(loaded, model)),
            device="cpu",
            budget=max(1, int(limit)),
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
    return recipe.with_policy(policies.get(found.precision, Policy.FLOAT32)), found.label


def ours(task: str, limit: float) -> tuple[Recipe, str]:
    """`autoprec tune`, from scratch, as the README says it is run."""
    return _tuned(task, limit)


def ours_at_the_batch(task: str, limit: float) -> tuple[Recipe, str]:
    """`autoprec tune` at the user's batch."""
    return _tuned(task, limit, batch_sizes=(USERS_BATCH,))


def _tuned(task: str, limit: float, **settings: Any) -> tuple[Recipe, str]:
    from autoprec.api import tune

    with tempfile.TemporaryDirectory() as folder:
        profile = tune(
            TASKS / f"{task}.py",
            device="cpu",
            output=Path(folder) / "profile.yaml",
            storage=str(Path(folder) / "study.journal"),
            time_limit=limit,
            **settings,
        )
    evidence = profile.evidence
    gain = f"{evidence.over_baseline.in_words()} over {profile.describe_baseline()}"
    note = evidence.inconclusive or (gain if evidence.over_baseline.rounds else evidence.reason)
    return replace(profile.recipe, forced=False), note


SEARCHES: dict[str, Callable[[str, float], tuple[Recipe, str]]] = {
    "float32": plain,
    "bf16 autocast": autocast,
    "lightning": lightning,
    "accelerate": accelerate,
    "pytorch-autotune": autotune,
    OURS: ours,
    OURS_AT_THE_BATCH: ours_at_the_batch,
}
RIVALS = tuple(name for name in SEARCHES if name not in OWN)

#: Whose search decides on the layout, too.
CHOOSES_LAYOUT = ("pytorch-autotune",)


def environment(name: str) -> dict[str, str]:
    """What a search's environment has besides this one's."""
    return dict(KEPT) if name in RIVALS else {}


def search_here(name: str, task: str, memory: int, limit: float) -> dict[str, Any]:
    """Run one search in this process; one that fails is a result."""
    if name in RIVALS:  # ours limits its own workers
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    began = time.monotonic()
    found: dict[str, Any] = {}
    try:
        recipe, found["note"] = SEARCHES[name](task, limit)
        found["recipe"] = to_plain(recipe)
    except Exception as error:
        found["note"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    return {**found, "seconds": time.monotonic() - began, "tried": TRIED}


def search_apart(name: str, task: str, memory: int, limit: float) -> dict[str, Any]:
    """Run one search in a process of its own; a crash or a hang is a result too.

    `limit` are the seconds that any of them may search.
    """
    command = [sys.executable, "-m", "benchmarks.peers.searches", name, task]
    command += ["--memory", str(memory), "--limit", str(limit)]
    until = time.monotonic() + limit + GRACE
    peak = 0
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as told:
        surroundings = child_environment(**environment(name))
        child = subprocess.Popen(command, stdout=told, stderr=said, env=surroundings)
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
    """Note that a search tries a batch, for the parent process too."""
    TRIED.append(batch)
    print(f"tried {batch}", file=sys.stderr, flush=True)


def main() -> None:
    """Run one search and print what it found as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("search", choices=list(SEARCHES))
    parser.add_argument("task")
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--limit", type=float, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found = search_here(arguments.search, arguments.task, arguments.memory, arguments.limit)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
