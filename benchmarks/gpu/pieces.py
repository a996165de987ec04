"""The pieces of `evidence`, one to a process: each prints what it saw, a JSON row a line.

    python -m benchmarks.gpu.pieces grid-mlp ROWS --device cuda [--quick]

A row is in the file ROWS as soon as it is known, after those that are there already. What a piece
could not do ends it with code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch  # noqa: F401  # in this thread: a pretended device is that of who imports it

from autoprec.api import probe
from autoprec.backends.shared import matmul_timing
from autoprec.core.codec import from_plain, to_plain
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.family import Support
from autoprec.core.device.merging import with_measurements
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.placement import expose_only
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.workers.task_source import TaskSource
from benchmarks.checkout import REAL_TASKS, ROOT, TASKS, TESTS
from benchmarks.gpu.piece_files import NOT_DONE, row_text
from benchmarks.gpu.real_models import MODELS
from benchmarks.gpu.real_rows import real_rows
from benchmarks.interleaving import interleaved
from benchmarks.recordings.record import record
from benchmarks.search.oracle import tune_from_scratch

#: The tasks of which a GPU is busy, at these batches; and one for a dry run.
BATCHES: Mapping[str, int] = {"mlp": 4096, "encoder": 1024, "gpt": 256, "unet": 512}
DRY = "tiny"
POLICIES = (Policy.FLOAT32, Policy.TF32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16)

TUNING = {"search_limit": 25.0, "proof_seconds": 10.0, "rounds": 3, "extras": True, "knobs": {}}
#: Of a model of real size a step takes longer, and the compiler may bring most.
#: `time_limit` ends a tuning with a result before the piece's own limit ends it with none.
REAL_TUNING = {**TUNING, "search_limit": 60.0, "proof_seconds": 30.0, "time_limit": 140.0}
REAL_TUNING |= {"compile": True}
DRY_TUNING = {"trials": 2, "rounds": 1, "proof_seconds": 2.0, "extras": False, "knobs": {}}
ROUNDS = 6

#: pytest's options where the plugin is not there whose setting pyproject.toml has.
WITHOUT_TIMEOUTS = ["-o", "addopts=-q", "-W", "ignore::pytest.PytestConfigWarning"]
WITHOUT_TIMEOUTS += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]

#: How long the zoo is judged: what is not reached is left out, and said.
ZOO_SECONDS = 60.0
ZOO_SEEDS = (1000,)
ZOO_TRUTH_SEEDS = (4, 8)
DRY_ZOO = ["binary_logits"]


@dataclass(frozen=True)
class Setting:
    """Where a piece runs, whether it is cut down to a dry run, and the rows that it has already."""

    device: str
    quick: bool = False
    earlier: Sequence[Mapping[str, Any]] = ()
    known: Mapping[str, Any] | None = None

    @cached_property
    def facts(self) -> DeviceFacts:
        """What is known of the device: as it was told, for to probe it takes seconds."""
        if self.known is not None:
            return from_plain(DeviceFacts, self.known)
        return probe(device=self.device).devices[0].facts

    @property
    def where(self) -> str:
        """The device as torch names it, in this process that is shown it alone."""
        return expose_only(self.facts.observation).device


Rows = Iterator[dict[str, Any]]


class PieceFailed(Exception):
    """A piece that did not do all it should."""


def device(setting: Setting) -> Rows:
    """What the probe makes of the device, and the machine's recording."""
    _, recording = record(f"{setting.facts.name}, recorded by benchmarks/gpu/evidence.py")
    yield {"facts": to_plain(setting.facts), "recording": to_plain(recording)}


def products(setting: Setting) -> Rows:
    """Matrix products per dtype, and a large copy."""
    wanted = [DType.FLOAT32] if setting.quick else None
    measured = matmul_timing.measure(setting.facts, ["torch"], wanted)
    facts = with_measurements(setting.facts, measured)
    for dtype, fact in facts.dtypes.items():
        yield {"dtype": dtype.value, **to_plain(fact)}
    yield {"memory_bandwidth_gbps": facts.measured_memory_bandwidth_gbps, "notes": facts.notes}
    if not facts.measured_with:
        raise PieceFailed("; ".join(facts.notes) or "nothing was measured")


def tests(setting: Setting) -> Rows:
    """The gpu tests; they are only collected where the device is not theirs."""
    words = ["-m", "gpu and not keras", "-p", "no:cacheprovider"]
    if find_spec("pytest") is None:
        raise PieceFailed(f"pytest is not installed for {sys.executable}")
    if find_spec("pytest_timeout") is None:
        words += WITHOUT_TIMEOUTS
    if setting.facts.kind is not DeviceKind.CUDA:
        words += ["--collect-only"]
    words += gpu_test_files()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", *words, f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    for case in cases:
        ended = [e for e in case if e.tag in ("failure", "error", "skipped")]
        yield {
            "test": f"{case.get('classname')}.{case.get('name')}",
            "outcome": ended[0].tag if ended else "passed",
            "seconds": float(case.get("time", "0")),
            **({"message": (ended[0].get("message") or "")[:500]} if ended else {}),
        }
    last = done.stdout.strip().splitlines()[-1:]
    yield {"summary": "".join(last), "code": done.returncode}
    if done.returncode:
        raise PieceFailed(f"pytest ended with {done.returncode}: {''.join(last)}\n{done.stderr}")


def gpu_test_files() -> list[str]:
    """The files that have such tests; others may want what is not installed."""
    found = [
        path
        for path in TESTS.rglob("test_*.py")
        if "\npytestmark = pytest.mark.gpu" in path.read_text()
    ]
    return [path.relative_to(ROOT).as_posix() for path in found]


def tuning(path: Path, asked: Mapping[str, Any], setting: Setting) -> Rows:
    """One tuning from scratch."""
    asked = DRY_TUNING if setting.quick else asked
    with tempfile.TemporaryDirectory() as folder:
        profile, clock = tune_from_scratch(
            path, Path(folder), seed=0, device=setting.device, **asked
        )
    yield {
        "task": path.stem,
        "recipe": to_plain(profile.recipe),
        "evidence": to_plain(profile.evidence),
        "stages": clock.seconds,
        "trials": clock.trials,
        "killed": clock.killed,
        "peak_memory_bytes": clock.peak,
    }


def real(model: str, setting: Setting) -> Rows:
    """Every way of training one model of real size, by turns."""
    has_tf32 = setting.facts.fact(DType.TF32).support is not Support.ABSENT
    failed = yield from real_rows(
        MODELS[model], setting.where, setting.quick, has_tf32, setting.earlier
    )
    if failed:
        raise PieceFailed(failed)


def grid(task: str, setting: Setting) -> Rows:
    """Every policy in alternation, plain and compiled, at one batch and the tuned loss scale."""
    facts = setting.facts
    target = Target(facts, {}, lambda known, _: known)
    job = TuningJob(TaskSource(TASKS / f"{task}.py"), target, Options(), lambda event: None)
    recipes = list(grid_recipes(task, setting, facts))
    running, failed, rates, peaks = list(recipes), {}, {}, {}
    while running:
        try:
            with interleaved(job, running, together=True, concurrently=True) as timing:
                finals = timing.run(1 if setting.quick else ROUNDS)
            rates = {final.recipe.key(): list(final.rates) for final in finals}
            peaks = {
                recipe.key(): max(m.peak_memory_bytes for m in measured)
                for recipe, measured in zip(running, timing.measured, strict=True)
            }
            break
        except FinalistFailed as failure:
            failed[failure.recipe.key()] = str(failure).splitlines()[0][:300]
            running.remove(failure.recipe)
    plain = rates.get(recipes[0].key())
    for recipe in recipes:
        row = {"task": task, "recipe": to_plain(recipe)}
        own = rates.get(recipe.key())
        if own is None:
            yield {**row, "failed": failed[recipe.key()]}
            continue
        over = to_plain(paired_ratio(own, plain)) if plain else None
        rate, peak = statistics.median(own), peaks[recipe.key()]
        yield {**row, "samples_per_second": rate, "over_float32": over, "peak_memory_bytes": peak}
    if not rates:
        raise PieceFailed(f"no recipe of {task} ran: {next(iter(failed.values()))}")


def grid_recipes(task: str, setting: Setting, facts: DeviceFacts) -> Iterator[Recipe]:
    """Plain float32 first; a dry run compiles nothing, for that alone takes minutes on a CPU."""
    size = 8 if setting.quick else BATCHES.get(task, 32)
    for policy in POLICIES:
        if policy is Policy.TF32 and facts.fact(DType.TF32).support is Support.ABSENT:
            continue
        recipe = Recipe(policy=policy, batch_size=size)
        if policy.needs_loss_scale:
            recipe = scaled(task, replace(recipe, loss_scale=LossScale()), setting.where)
        yield recipe
        if not setting.quick:
            yield replace(recipe, compile=True)


def scaled(task: str, recipe: Recipe, where: str) -> Recipe:
    """The recipe at the loss scale that the tuner would choose."""
    from autoprec.tuning.proof.recipe_proof import Proof
    from autoprec.workers.task_file import load_task
    from benchmarks.numerics.judge import at_tuned_scale, tracer

    return at_tuned_scale(Proof(tracer(load_task(TASKS / f"{task}.py"), device=where)), recipe)


def overhead(setting: Setting) -> Rows:
    """What a step costs more through `apply_profile` than written by hand."""
    from benchmarks.overhead.torch_steps import WIDTHS, measure

    target, rounds, budget = (0.0002, 1, 0.002) if setting.quick else (0.005, 5, 0.5)
    for policy in WIDTHS:
        found = measure(policy, target, rounds=rounds, budget=budget, device=setting.where)
        yield asdict(found)


def numerics(setting: Setting) -> Rows:
    """What the tuner decides of the zoo's tasks in bfloat16 and float16, beside what is known."""
    from benchmarks.numerics.zoo import ZOO, jobs_of, judged

    only = DRY_ZOO if setting.quick else []
    jobs = jobs_of(ZOO, only, ZOO_SEEDS, ("confusion",), setting.where)
    random.Random(0).shuffle(jobs)  # those that are reached stand for the whole
    processes, reached = min(8, os.cpu_count() or 1, len(jobs)), 0
    for found in judged(jobs, processes, ZOO_SECONDS, verdicts_or_why):
        reached += 1
        yield from found["confusion"]
    yield {"tasks": reached, "of": len(jobs)}


def verdicts_or_why(job: Any) -> dict[str, list[dict[str, Any]]]:
    """A zoo task's rows; where it does not run on the device, why."""
    from benchmarks.numerics.zoo import run

    try:
        return run(job, with_truth_here)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return {table: [{"task": job.path.stem, "failed": why}] for table in job.tables}


def with_truth_here(task: Any, job: Any) -> Rows:
    """The verdicts on one task, with the truth of the device where they contradict a CPU's.

    A CPU's autocast casts other operators. The loops that are written by hand tell what becomes of
    the task here.
    """
    from benchmarks.numerics.truth_torch import truth_of
    from benchmarks.numerics.zoo import verdicts

    for row in verdicts(task, job):
        policy = row["policy"]
        if (row["truth"] == "broken") == (row["verdict"] == "equal"):
            found = truth_of(task, device=job.device, policies=(policy,), seeds=ZOO_TRUTH_SEEDS)
            here = found[policy]
            row |= {"truth_here": here["label"], "why_here": here.get("why", "")}
        yield row


PIECES: Mapping[str, Callable[[Setting], Rows]] = {
    "device": device,
    "products": products,
    "tests": tests,
    **{f"real-{model}": partial(real, model) for model in MODELS},
    **{
        f"tune-{task}": partial(tuning, REAL_TASKS / f"{task}.py", REAL_TUNING)
        for task in ("gpt2", "resnet50", "bert_512")
    },
    **{f"tune-{task}": partial(tuning, TASKS / f"{task}.py", TUNING) for task in (*BATCHES, DRY)},
    **{f"grid-{task}": partial(grid, task) for task in (*BATCHES, DRY)},
    "overhead": overhead,
    "numerics": numerics,
}


def main() -> int:
    """Run one piece."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--given", type=Path, help="what else it is told, in a file")
    arguments = parser.parse_args()
    given = {"head": {}, "earlier": [], "facts": None}
    if arguments.given is not None:
        given = json.loads(arguments.given.read_text(encoding="utf-8"))
    setting = Setting(arguments.device, arguments.quick, given["earlier"], given["facts"])
    try:
        with arguments.rows.open("a", encoding="utf-8", buffering=1) as file:
            for row in PIECES[arguments.piece](setting):
                file.write(f"{row_text(arguments.piece, given['head'], row, NOT_DONE)}\n")
    except PieceFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
