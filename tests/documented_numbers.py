"""Where the numbers of the README and the pages come from, snippet by snippet.

A number is a result's, a constant's of the code, one that a program printed on the same page, or
it stands in `REASONS` with why nothing of this repository can hold it. docs/results.md and the
README's tables are not here: `benchmarks.report` makes them, and test_report_page.py compares.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, CURVES = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "curves"
MIB, GIB = 2.0**20, 2.0**30

#: The numbers that a snippet shows, in its order.
Shown = Callable[[], list[float]]


def constant(path: str, *factors: float) -> Shown:
    """A constant, as "core.module:NAME" or "core.module:Class.field"; each factor's multiple of it.

    A tuple's members are one number each, all times the one factor.
    """
    module, _, names = path.partition(":")

    def shown() -> list[float]:
        value: Any = import_module(f"autoprec.{module}")
        for name in names.split("."):
            value = getattr(value, name)
        if isinstance(value, tuple):
            return [each * (factors or (1.0,))[0] for each in value]
        return [float(value) * factor for factor in factors or (1.0,)]

    return shown


def product(*paths: str) -> Shown:
    """The product of constants, in per cent."""

    def shown() -> list[float]:
        value = 100.0
        for path in paths:
            value *= constant(path)()[0]
        return [value]

    return shown


def beyond_one(path: str) -> Shown:
    """Factors above one, in per cent more."""
    return lambda: [abs(100 * (each - 1)) for each in constant(path)()]


def shrunk(path: str) -> Shown:
    """What is left of a number, in per cent, that is smaller by a logarithm."""
    return lambda: [100 * math.exp(-each) for each in constant(path)()]


def grid_rates() -> Iterator[dict[str, tuple[float, dict[str, Any]]]]:
    """Each recorded grid: a point's text, its rate and itself."""
    for path in CURVES.glob("*/*.json"):
        rows = json.loads(path.read_text(encoding="utf-8"))["grid"]
        yield {
            json.dumps(row["point"], sort_keys=True): (
                row["measurement"]["samples_per_step"] / row["measurement"]["step_seconds"],
                row["point"],
            )
            for row in rows
            if row.get("measurement")
        }


def bfloat16_over_float32() -> list[float]:
    """The least and the most of all recorded grids, at the same batch and settings."""
    found = []
    for grid in grid_rates():
        for rate, point in grid.values():
            if point["policy"] == "mixed_bfloat16":
                alike = json.dumps({**point, "policy": "float32"}, sort_keys=True)
                found += [rate / grid[alike][0]] if alike in grid else []
    return [min(found), max(found)]


def kept_in_the_grids() -> list[float]:
    """What kept memory brings a grid's fastest recipe, in per cent, where its batch is large."""
    found = []
    for grid in grid_rates():
        rate, point = max(grid.values(), key=lambda pair: pair[0])
        plain = json.dumps({**point, "keep_memory": False}, sort_keys=True)
        if point.get("keep_memory") and point["batch_size"] >= 4 * 32 and plain in grid:
            found.append(100 * (rate / grid[plain][0] - 1))
    return [min(found), max(found)]


def kept_alone() -> list[float]:
    """The least and the most that keeping freed memory brought by itself."""
    texts = [json.loads(p.read_text()) for p in RESULTS.glob("keep_memory-*.json")]
    found = [row["kept_over_plain"]["ratio"] for text in texts for row in text["rows"]]
    return [min(found), max(found)]


def of_the_lstm(way: str) -> Shown:
    """What another way gave of the speed of an LSTM's profile, run after run."""

    def shown() -> list[float]:
        runs = [json.loads(p.read_text()) for p in sorted(RESULTS.glob("ablation-*.json"))]
        rows = [row for run in runs for row in run["rows"] if row["way"] == way]
        return [row["over_profile"]["ratio"] for row in rows]

    return shown


def float16_products() -> list[float]:
    """The slowest float16 products that a recorded tuning refused the policy for."""
    text = "".join(p.read_text() for p in RESULTS.glob("oracle-*.jsonl"))
    found = re.findall(r"float16 products are slower than float32's \(measured: ([\d.]+)x", text)
    return [min(map(float, found))]


def widest_interval() -> list[float]:
    """How far the ends of a recorded tuning's interval lie apart at most."""
    text = "".join(p.read_text() for p in RESULTS.glob("oracle-*.jsonl"))
    found = re.findall(r"float32 as it was run \(([\d.]+)-([\d.]+), ", text)
    return [max(float(high) / float(low) for low, high in found)]


def truth(task: str) -> Shown:
    """How far bfloat16 ended from float32 in long runs, in per cent, and after how many steps."""

    def shown() -> list[float]:
        folder = ROOT / "tests" / "zoo" / "field"
        row = json.loads((folder / "truth.json").read_text())["tasks"][task]["bfloat16"]
        steps = re.findall(r"^TRUTH_STEPS = (\d+)$", (folder / f"{task}.py").read_text(), re.M)
        return [100 * abs(row["difference"]), *map(float, steps)]

    return shown


def origin_of_losses(*counts: tuple[str, str, int]) -> Shown:
    """Broken pairs caught (0) and there (1): by file's ending, constant in the loss, and which."""

    def shown() -> list[float]:
        found = []
        for ending, added, which in counts:
            path = RESULTS / f"loss_constants-2026-11-26-amd-zen5{ending}.json"
            found.append(json.loads(path.read_text())["counts"][added]["broken_caught"][which])
        return found

    return shown


def noise_in(null: str) -> Shown:
    """Broken pairs caught and there, healthy ones flagged and there, by this noise."""

    def shown() -> list[float]:
        rows = json.loads((RESULTS / "noise_of_what-2026-11-25.json").read_text())["rows"]
        kinds = [[r for r in rows if r["truth"] == truth] for truth in ("broken", "healthy")]
        return [n for own in kinds for n in (sum(not row[null] for row in own), len(own))]

    return shown


def caught_and_flagged(null: str) -> Shown:
    """Broken pairs caught and healthy ones flagged by this noise."""
    return lambda: noise_in(null)()[::2]


def same_beside_others() -> list[float]:
    """How many tasks were proven alone and beside busy processes, if no verdict differed."""
    tasks = json.loads((RESULTS / "same_verdict-2026-11-25.json").read_text())["tasks"]
    return [sum(task["alone"] == task["beside"] for task in tasks)]


def trained(task: str, side: str) -> Shown:
    """A task's batch (if tuned), updates, samples, and accuracies in per cent: mean, ends."""

    def shown() -> list[float]:
        rows = json.loads((RESULTS / "newcomer-2026-11-27-intel-amx.json").read_text())["rows"]
        (row,) = (r for r in rows if (r["task"], r["side"]) == (task, side))
        found = [100 * run["accuracy"] for run in row["runs"]]
        ((updates, samples),) = {(run["updates"], run["samples"]) for run in row["runs"]}
        batch = [row["recipe"]["batch_size"]] if "recipe" in row else []
        return [*batch, updates, samples, sum(found) / len(found), min(found), max(found)]

    return shown


def gpt_on_h200(*recipes: tuple[str, bool]) -> Shown:
    """The batch, then a GPT's speed over float32 by policy and whether it was compiled."""

    def shown() -> list[float]:
        text = (RESULTS / "gpu_grid-gpt-2026-11-26-nvidia-h200.jsonl").read_text()
        rows = [row for row in map(json.loads, text.splitlines()) if row.get("over_float32")]
        own = {(r["recipe"]["policy"], r["recipe"]["compile"]): r["over_float32"] for r in rows}
        (batch,) = {row["recipe"]["batch_size"] for row in rows}
        return [batch, *(own[recipe]["ratio"] for recipe in recipes)]

    return shown


def written(path: str, pattern: str) -> Shown:
    """The one number that all the matches in a file have: it is read, for it needs a framework."""

    def shown() -> list[float]:
        (found,) = set(re.findall(pattern, (ROOT / path).read_text(encoding="utf-8")))
        return [float(found)]

    return shown


CONFIDENCE = constant("core.statistics:CONFIDENCE", 100)
MEMORY = "backends.shared.process_memory"
DEVIATION = "core.numerics.tolerance:Tolerance.trajectory"

#: By page: a snippet that holds one number, or two, and what they are.
SOURCES: dict[str, dict[str, Shown]] = {
    "README.md": {
        "ran at 0.34 to 3.61 times the speed": bfloat16_over_float32,
        "in float16 at as little as 0.012 times": float16_products,
        "alone brought 1.03 to 2.5 times": kept_alone,
    },
    "docs/method.md": {
        "less a tenth or 512 MiB": constant("workers.memory_limit:RESERVE_BYTES", 1 / MIB),
        "hold more than 1 GiB of": constant("workers.cpu_contention:_IDLE_DEVICE_BYTES", 1 / GIB),
        "trains at 0.71 and 0.54 times the speed": of_the_lstm("the profile, without keep_memory"),
        "instead of `mallopt`: 0.98 and 0.99 times": of_the_lstm(
            "the profile, memory kept by the environment"
        ),
        "float32 products: 1.01 and 0.99": of_the_lstm("the profile, with implicit_bfloat16"),
        "twice the batch: 0.94 and 1.01": of_the_lstm("the profile at twice the batch"),
        "only the 0.94 is": lambda: of_the_lstm("the profile at twice the batch")()[:1],
        "with its 95 % interval": CONFIDENCE,
        "is narrower than 2 %": constant("core.speed.timing_budget:TimingBudget.precision", 100),
        "A step that is 20 to 65 % slower": beyond_one("core.speed.noise:_DISTURBED_RATIO_RANGE"),
        "grows by more than 8 MiB": constant(
            "backends.shared.process_memory:MemoryGrowth.NOISE_BYTES", 1 / MIB
        ),
        "its ratio lies below 82 % of": shrunk("core.speed.consistency:OVERSTATED_LOG_RATIO"),
        "is older than 20 s": constant("tuning.search.drift_correction:_CHECK_SECONDS"),
        "difference is above 10 %": constant("tuning.search.drift_correction:_LOG_THRESHOLD", 100),
        "using more than 15 % of the processors": constant("core.speed.contention:BUSY_SHARE", 100),
        "a turn of 0.15 s": constant("core.speed.best_arm:TURN_SECONDS"),
        "for at most 5 s at a time": constant("workers.cpu_contention:_LONGEST_WAIT_SECONDS"),
        "spends 40 s on this": constant("workers.cpu_contention:PATIENCE_SECONDS"),
        "at most 5 % of a time limit": constant("tuning.job:_PATIENCE_SHARE", 100),
        "varies by more than 25 %": constant("tuning.profile.warnings:NOISY_SPREAD", 100),
        "more than 1 % faster (": constant("core.speed.stopping:Limits.gain", 100),
        "A trial that is 20 to 65 %": beyond_one("core.speed.noise:_DISTURBED_RATIO_RANGE"),
        "is 3 % of the step or more": constant("core.speed.knobs:_OPTIMIZER_SHARE", 100),
        "trials differ by less than 15 %": beyond_one(
            "core.speed.keep_memory:_CLEARLY_FASTER_RATIO"
        ),
        "faster by more than 2 %": constant("core.speed.noise:MIN_GAIN", 100),
        "it then brings 5 to 274 %": kept_in_the_grids,
        "a smaller one within 0.25 %": constant(
            "core.speed.selection:OTHER_BATCH_SAME_SPEED_SHARE", 100
        ),
        "ends more than 5 % away": product(
            DEVIATION,
            "core.numerics.late_failures:LONG_RUN_FACTOR",
            "core.numerics.late_failures:SECOND_SEED_SHARE",
        ),
        "same side, more than 10 %": product(
            DEVIATION, "core.numerics.late_failures:LONG_RUN_FACTOR"
        ),
        "it must be below 10 %": product(DEVIATION, "core.numerics.late_failures:LONG_RUN_FACTOR"),
        "no harm ends within 5 %": product(DEVIATION),
        "stay within 8 %": product(DEVIATION, "core.numerics.parity:SECOND_HALF_FACTOR"),
        "A loss more than 3.5 %": product(
            "core.numerics.tolerance:Tolerance.loss",
            "core.numerics.single_step:UNTRAINED_NOISE_FACTOR",
        ),
        "stay within 0.5 %": constant("core.numerics.parity:CLOSE_DEVIATION", 100),
        "where it stays within 0.5 %": constant("core.numerics.parity:CLOSE_DEVIATION", 100),
        "falls by less than 35 %": constant("core.numerics.proof_steps:FALLING_LOSS_SHARE", 100),
        "is 20 % away from float32 at step 300": truth("variance_of_rows"),
        "the same way by more than 5 %": product(
            DEVIATION,
            "core.numerics.late_failures:LONG_RUN_FACTOR",
            "core.numerics.late_failures:SECOND_SEED_SHARE",
        ),
        "is 12 % away at step 500": truth("physics_informed"),
        "single timing's noise (10 %)": constant("core.speed.reranking:SEARCH_RATIO_ERROR", 100),
        "and 30 s at most": constant("core.speed.reranking:_MAX_SECONDS"),
        "accelerator's is 0.92 of what": constant("backends.protocol:USABLE_FREE_MEMORY_SHARE"),
        "more than 0.95 of the budget": constant("tuning.search.loop:_MEMORY_SHARE"),
        "slower than 0.85 of one that passed": constant("tuning.proof.stage:_MIN_SPEED_SHARE"),
        "equals the whole batch's within 1e-4": written(
            "autoprec/backends/torch/train/batch_splitting.py", r"(?m)^_GRADIENT_TOLERANCE = (.+)$"
        ),
        "97 of the zoo's 113 broken pairs are caught, and 103 without": origin_of_losses(
            ("", "ten first losses", 0), ("", "none", 1), ("", "none", 0)
        ),
        "losses had an origin, 84 were": origin_of_losses(("-earlier", "ten first losses", 0)),
        "catches 72 of 85 broken pairs and flags 6 of 255 healthy ones": noise_in("weights"),
        "catches 62 and flags 9 (": caught_and_flagged("products"),
        "proves 24 tasks alone": same_beside_others,
        "is one of 480, 120, 30 or 8:": lambda: constant(
            "core.numerics.proof_steps:PROOF_LENGTHS"
        )()[::-1],
        "interval (2000 good steps": constant("core.numerics.loss_scale:GROWTH_INTERVAL"),
        "by more than those 10 %": constant("core.speed.reranking:SEARCH_RATIO_ERROR", 100),
        "with 512 MiB more": constant(
            "tuning.confirmation.interleaved_timing:_CONTEXT_BYTES", 1 / MIB
        ),
        "within 5 % of the fastest": lambda: [
            100 - constant("core.speed.trial_results:MAY_BE_FASTEST_SHARE", 100)()[0]
        ],
        "an interval of 95 %": CONFIDENCE,
        "or 5 s, not counting": constant("tuning.confirmation.ablations:COMPARISON_SECONDS"),
        "brings less than 1 %": constant("core.speed.selection:SAME_SPEED_SHARE", 100),
        "gain more than 2 % over": constant("core.speed.noise:MIN_GAIN", 100),
        "more than 15 % slower": beyond_one(
            "tuning.confirmation.interleaved_timing:_DISTURBED_RATIO"
        ),
        "more than 1.5 times apart": constant("core.speed.consistency:WIDE_INTERVAL_FACTOR"),
        "are 1.42 times apart at most": widest_interval,
        "takes up to 1.65 times as long": lambda: constant(
            "core.speed.noise:_DISTURBED_RATIO_RANGE"
        )()[1:],
        "more than √10 times faster": lambda: [
            constant("core.speed.consistency:RATE_CHANGE_FACTOR")()[0] ** 2
        ],
        "comparison end at 45 % of it": constant("tuning.time_limit:SEARCH_SHARE", 100),
        "and proofs at 80 %": constant("tuning.time_limit:PROOF_SHARE", 100),
        "(4 us each)": constant("core.speed.step_bounds:LAUNCH_SECONDS", 1e6),
        "some 10 us for each": constant("core.speed.step_bounds:FRAMEWORK_LAUNCH_SECONDS", 1e6),
        "at least 1.1 times as fast": constant("core.device.policies:_SAME_SPEED_RATIO"),
    },
    "docs/first-hour.md": {
        "as it was | | 380 | 23940 | 98.3% | 98.0% to 98.7%": trained(
            "digits_net", "float32 as it was"
        ),
        "float32, batch 64 | 380 | 23940 | 98.5% | 98.3% to 98.7%": trained("digits_net", "tuned"),
        "mixed_bfloat16, batch 64 | 380 | 23940 | 98.1% | 97.7% to 98.3%": trained(
            "digits_net", "mixed_bfloat16"
        ),
        "mixed_float16, batch 64 | 380 | 23940 | 98.1% | 97.3% to 98.7%": trained(
            "digits_net", "mixed_float16"
        ),
        "as it was | | 330 | 42240 | 99.8% | 99.4% to 100.0%": trained(
            "digits_conv", "float32 as it was"
        ),
        "mixed_bfloat16, batch 128 | 330 | 42240 | 99.8% | 99.7% to 100.0%": trained(
            "digits_conv", "tuned"
        ),
        "mixed_bfloat16, batch 128 | 330 | 42240 | 99.8% | 99.4% to 100.0%": trained(
            "digits_conv", "mixed_bfloat16"
        ),
    },
    "docs/scale.md": {
        "and losses in float32 within 1e-5)": written(
            "tests/backends/torch/distributed/test_wrapping.py",
            r"expected\.losses, rel=([\de-]+)\)",
        ),
    },
    "docs/worth-it.md": {
        "at batch 256 ran at 1.27x float32 under bfloat16 and at 1.49x in TF32; compiled, "
        "bfloat16 ran at 1.81x": gpt_on_h200(
            ("mixed_bfloat16", False), ("tf32", False), ("mixed_bfloat16", True)
        ),
    },
}

#: By page: snippets whose numbers a program printed, in a fence of the same page.
PRINTED: dict[str, tuple[str, ...]] = {
    "docs/method.md": ("others used to 87 %",),
    "docs/first-hour.md": (
        "2.86 times the speed",
        "precision brings 2.56x",
        "add 1.11x",
        "0.0033 %",
    ),
}

#: By page: snippets that nothing here can hold, and why.
REASONS: dict[str, dict[str, str]] = {
    "docs/method.md": {
        "of more than 32 MiB at once": "glibc's: DEFAULT_MMAP_THRESHOLD_MAX, mallopt(3)",
        "as in 1.48x (1.10-2.18)": "an example; tests/core/speed/test_consistency.py judges it",
        "13.8x in the table": "an example; tests/core/speed/test_consistency.py judges it",
        "0.44x in the end": "an example; tests/core/speed/test_consistency.py judges it",
        "loss 2.3 to 0.9": "an example of a verdict's words",
        "said 38x (30-60); on the idle machine it is 20x": "seen by hand, as the text says there",
    },
    "docs/migration.md": {"in accelerate 0.16": "a version of accelerate"},
    "docs/scale.md": {"such as `rank 1 of 2:": "an example of an error message"},
}
