"""Compares two nulls for single steps: noise in the weights, and noise in the products.

    python -m benchmarks.numerics.noise_placement [--output FILE]

Autocast rounds what goes into a matrix product and what comes out of it, not the stored weights; so
noise in the results of products, forward and backward, is nearer to what a 16-bit policy does. Both
kinds are uniform and +-2**-9 of the number. A pair passes by the single-step test alone: the loss
within the larger of 1 % and four times the noise's effect, the gradient within the larger of 0.5
and four times it (no more than 0.9); three quarters of the 1 %, and 3/8 of the noise, for float16.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autoprec.backends.shared.tracer import ComparisonTracer, batch_seed
from autoprec.backends.torch.train.model_state import RELATIVE_NOISE, gradient_error
from autoprec.core.numerics.single_step import check_single_steps
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.traces import NoisyStep
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.tuning.proof.recorded_runs import NOISE_DRAWS
from autoprec.workers.task_file import load_task
from benchmarks.numerics.judge import at_tuned_scale, tracer
from benchmarks.numerics.labels import BATCH, POLICIES
from benchmarks.numerics.zoo import FIELD, ZOO, Job, jobs_of, judged
from benchmarks.numerics.zoo_tables import JUDGED, share

NULLS = ("weights", "products")
MARKS = (0, 2, 8, 29)

_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "mkldnn_rnn_layer"),
    *("convolution", "convolution_backward", "_scaled_dot_product_flash_attention_for_cpu"),
)


class NoisyProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies what every product gives by 1 + uniform(-2**-9, 2**-9)."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        return tree_map(self._noisy, result) if name in _PRODUCTS else result

    def _noisy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return value
        drawn = torch.rand(value.shape, generator=self._generator)
        return value * (1 + RELATIVE_NOISE * (2 * drawn - 1))


def noise_of_products(trace: ComparisonTracer) -> Iterator[NoisyStep]:
    """What noise in the products does at the checkpoints of a float32 run."""
    with trace._trainee(trace._float32(), 0, reference=True) as trainee:
        for draw, kept in itertools.product(range(NOISE_DRAWS), trace._checkpoints):
            trainee.put_back(kept.state)
            with NoisyProducts(draw):
                seed = batch_seed(0, kept.step, 0)
                loss, gradient = trainee.loss_and_gradient(kept.batch, seed)
            if kept.loss is not None and kept.gradient is not None:
                error = gradient_error(gradient, kept.gradient)
                finite = loss if math.isfinite(loss) else None
                yield NoisyStep(kept.step, finite, kept.loss, error)


def compared(job: Job) -> dict[str, list[dict[str, Any]]]:
    """Whether each policy of one task passes with either null."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task, rows = load_task(job.path), []
    trace = tracer(task, job.seeds[0])
    proof = Proof(trace, steps=MARKS[-1] + 1)
    for policy in JUDGED:
        label = job.truth[policy]["label"]
        recipe = at_tuned_scale(proof, POLICIES[policy])
        trace.reference(batch_size=BATCH, steps=MARKS[-1] + 1, checkpoints=MARKS)
        try:
            points = trace.compare_steps(recipe=recipe)
        except RuntimeError:  # no kernel, or code that float16 makes raise: no null decides it
            continue
        roundoff = recipe.policy.compute_dtype.limits.unit_roundoff
        nulls = (trace.noise(draws=NOISE_DRAWS), tuple(noise_of_products(trace)))
        passed = [check_single_steps(points, null, Tolerance(), roundoff).passed for null in nulls]
        row = {"task": job.path.stem, "policy": policy, "truth": label}
        rows.append(row | dict(zip(NULLS, passed, strict=True)))
    return {"rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table's lines."""
    yield "| noise in | broken caught | healthy flagged |\n|---|---|---|"
    for null in NULLS:
        caught, flagged = (_failed(rows, null, truth) for truth in ("broken", "healthy"))
        yield f"| {null} | {share(caught)} | {share(flagged)} |"
    for row in rows:
        if row["weights"] != row["products"] and row["truth"] != "unclear":
            only = next(null for null in NULLS if row[null])
            yield f"  {row['task']} {row['policy']}, {row['truth']}: passes by noise in {only} only"


def _failed(rows: Iterable[dict[str, Any]], null: str, truth: str) -> list[int]:
    of = [row for row in rows if row["truth"] == truth]
    return [sum(not row[null] for row in of), len(of)]


def main() -> int:
    """Read the arguments; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2, help="tasks at once")
    parser.add_argument("--output", type=Path, help="write the numbers here, as JSON")
    arguments = parser.parse_args()
    jobs = [job for f in (ZOO, FIELD) for job in jobs_of(f, [], (arguments.seed,), (), "cpu")]
    rows = [row for found in judged(jobs, arguments.jobs, judge=compared) for row in found["rows"]]
    print("\n".join(table(rows)))
    if arguments.output:
        head = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
        found = {"seed": arguments.seed, "rows": rows}
        arguments.output.write_text(json.dumps(head | found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
