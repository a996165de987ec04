"""What apply_profile costs per training step, against the same step written by hand.

    python benchmarks/overhead.py [--seconds 2] [--rounds 7] [--json]

Both sides train the same model on the same batch with the same optimizer, gradient clipping and
(for float16) loss scaling: one through `Precision`, the other with torch.autocast and
torch.amp.GradScaler as PyTorch's own AMP recipe writes it. Steps alternate in a round (A B B A),
so that a machine that drifts drifts for both; every round builds both models anew, in turn, so that
where memory happens to lie favours neither. A round's ratio is that of the two medians; printed are
the pseudomedian of the rounds and its 95 % interval. Rounds go on, up to `_MOST` times as many,
until the interval lies on one side of what is promised: where steps scatter, a few cannot tell.

The batch is grown until the hand-written step takes about the time asked for. One thread by
default: two threads on a busy machine scatter by far more than what is measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.statistics import Ratio, paired_ratio

WIDTHS = {Policy.FLOAT32: 256, Policy.MIXED_BFLOAT16: 64, Policy.MIXED_FLOAT16: 16}
DTYPES = {Policy.MIXED_BFLOAT16: torch.bfloat16, Policy.MIXED_FLOAT16: torch.float16}
CLASSES = 10

#: What a step may cost through `Precision`, and how many times the rounds asked for may show it.
PROMISED = 1.01
_MOST = 5


@dataclass(frozen=True)
class Result:
    """One case: how much longer a step takes through `Precision`."""

    policy: str
    batch_size: int
    step_milliseconds: float
    ratio: float
    low: float
    high: float
    overhead_microseconds: float
    fixed_microseconds: float
    rounds: int
    steps: int


Step = Callable[[], object]


def build(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, CLASSES))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def batch(width: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, width, generator=generator)
    return inputs, torch.randint(0, CLASSES, (size,), generator=generator)


def by_hand(policy: Policy, width: int, size: int) -> Step:
    model, optimizer = build(width)
    inputs, targets = batch(width, size)
    dtype = DTYPES.get(policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=policy.needs_loss_scale)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_profile(policy: Policy, width: int, size: int) -> Step:
    model, optimizer = build(width)
    inputs, targets = batch(width, size)
    scale = LossScale(initial=1024.0) if policy.needs_loss_scale else None
    recipe = Recipe(policy=policy, loss_scale=scale)
    precision = TorchSurgeon().apply(recipe, model=model, optimizers=(optimizer,), device="cpu")

    def step() -> None:
        with precision.autocast():
            loss = cross_entropy(model(inputs), targets)
        precision.backward(loss)
        precision.clip_grad_norm_(1.0)
        precision.step()

    return step


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def grown_batch(policy: Policy, target: float) -> int:
    """Return a batch size at which the hand-written step takes about `target` seconds."""
    size = 4
    while True:
        step = by_hand(policy, WIDTHS[policy], size)
        taken = statistics.median([seconds(step) for _ in range(9)][2:])
        if taken >= target * 0.9:
            return size
        size = max(size + 1, int(size * min(2.0, target / taken)))


def one_round(
    policy: Policy, shape: tuple[int, int], steps: int, *, profile_first: bool
) -> tuple[float, float]:
    """Return the median step of both sides, by profile and by hand; `shape` is width and batch."""
    order = [by_profile, by_hand] if profile_first else [by_hand, by_profile]
    sides = {make: make(policy, *shape) for make in order}
    ours, theirs = sides[by_profile], sides[by_hand]
    times: dict[Step, list[float]] = {ours: [], theirs: []}
    for _ in range(5):
        ours()
        theirs()
    gc.disable()
    for index in range(steps):
        pair = (ours, theirs) if index % 2 else (theirs, ours)
        for step in pair:
            times[step].append(seconds(step))
    gc.enable()
    return statistics.median(times[ours]), statistics.median(times[theirs])


def some_rounds(
    policy: Policy, shape: tuple[int, int], steps: int, rounds: int
) -> list[tuple[float, float]]:
    return [one_round(policy, shape, steps, profile_first=bool(i % 2)) for i in range(rounds)]


def rounds_that_tell(
    policy: Policy, shape: tuple[int, int], steps: int, rounds: int
) -> tuple[list[tuple[float, float]], Ratio]:
    """Rounds until their interval lies on one side of what is promised, and their ratio."""
    medians: list[tuple[float, float]] = []
    while True:
        medians += some_rounds(policy, shape, steps, rounds)
        ratio = paired_ratio([ours for ours, _ in medians], [theirs for _, theirs in medians])
        undecided = ratio.low <= PROMISED < ratio.high
        if not undecided or len(medians) >= _MOST * rounds:
            return medians, ratio


def microseconds(medians: list[tuple[float, float]]) -> float:
    return statistics.median(ours - theirs for ours, theirs in medians) * 1e6


def measure(policy: Policy, target: float, *, rounds: int, budget: float) -> Result:
    size = grown_batch(policy, target)
    steps = max(10, int(budget / target / 2))
    medians, ratio = rounds_that_tell(policy, (WIDTHS[policy], size), steps, rounds)
    return Result(
        policy=policy.value,
        batch_size=size,
        step_milliseconds=statistics.median(theirs for _, theirs in medians) * 1e3,
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        overhead_microseconds=microseconds(medians),
        fixed_microseconds=microseconds(some_rounds(policy, (8, 2), 500, 3)),
        rounds=ratio.rounds,
        steps=steps,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="time of one round")
    parser.add_argument("--rounds", type=int, default=7, help="at least")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[5.0, 20.0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = []
    if not arguments.json:
        print("policy          batch   step by hand   with apply_profile        cost   fixed cost")
    for policy in WIDTHS:
        for target in arguments.milliseconds:
            result = measure(
                policy, target / 1e3, rounds=arguments.rounds, budget=arguments.seconds
            )
            results.append(result)
            if not arguments.json:
                print(
                    f"{result.policy:14} {result.batch_size:6} {result.step_milliseconds:11.2f} ms"
                    f"   {result.ratio:.4f}x ({result.low:.4f}-{result.high:.4f})"
                    f" {result.overhead_microseconds:+7.0f} us"
                    f" {result.fixed_microseconds:+9.0f} us",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    worst = max(result.ratio for result in results)
    if not arguments.json:
        print(f"worst: {(worst - 1) * 100:+.2f} % (promised: at most {PROMISED - 1:+.0%})")
    return 0 if worst <= PROMISED else 1


if __name__ == "__main__":
    raise SystemExit(main())
