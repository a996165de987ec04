"""What apply_profile costs per training step, against the same step written by hand.

    python benchmarks/overhead.py [--device cpu] [--seconds 2] [--rounds 7] [--json]

Both sides train the same model on the same batch with the same optimizer, gradient clipping and
(for float16) loss scaling: one through `Precision`, the other with torch.autocast and
torch.amp.GradScaler as PyTorch's own AMP recipe writes it. Steps alternate in a round (A B B A),
so that a machine that drifts drifts for both; every round builds both models anew, in turn, so that
where memory happens to lie favours neither. A round's ratio is that of the two medians; printed are
the pseudomedian of the rounds and its 95 % interval. Rounds go on, up to `_MOST` times as many,
until the interval lies on one side of what is promised: where steps scatter, a few cannot tell.

The batch is grown until the hand-written step takes about the time asked for. One thread by
default: two threads on a busy machine scatter by far more than what is measured here. On an
accelerator the layers are wider, and every step is waited for.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoprec.backends.torch.devices import synchronize
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.statistics import Ratio, paired_ratio

WIDTHS = {Policy.FLOAT32: 256, Policy.MIXED_BFLOAT16: 64, Policy.MIXED_FLOAT16: 16}
WIDTH_ELSEWHERE = 2048  # of an accelerator's layers, which narrow ones would leave idle
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


@dataclass(frozen=True)
class Case:
    """What both sides train: the policy, how wide the layers are, the batch, and where."""

    policy: Policy
    width: int
    size: int
    device: str


Step = Callable[[], object]


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(case.width, case.width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(case.width, CLASSES)).to(case.device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(case.size, case.width, generator=generator)
    targets = torch.randint(0, CLASSES, (case.size,), generator=generator)
    return inputs.to(case.device), targets.to(case.device)


def by_hand(case: Case) -> Step:
    model, optimizer = build(case)
    inputs, targets = batch(case)
    dtype, scaled = DTYPES.get(case.policy), case.policy.needs_loss_scale
    scaler = torch.amp.GradScaler(case.device, init_scale=1024.0, enabled=scaled)

    def step() -> None:
        with torch.autocast(case.device, dtype, enabled=dtype is not None):
            loss = cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_profile(case: Case) -> Step:
    model, optimizer = build(case)
    inputs, targets = batch(case)
    scale = LossScale(initial=1024.0) if case.policy.needs_loss_scale else None
    recipe = Recipe(policy=case.policy, loss_scale=scale)
    surgeon = TorchSurgeon()
    precision = surgeon.apply(recipe, model=model, optimizers=(optimizer,), device=case.device)

    def step() -> None:
        with precision.autocast():
            loss = cross_entropy(model(inputs), targets)
        precision.backward(loss)
        precision.clip_grad_norm_(1.0)
        precision.step()

    return step


def seconds(step: Step, case: Case) -> float:
    start = time.perf_counter()
    step()
    synchronize(torch.device(case.device))
    return time.perf_counter() - start


def grown(case: Case, target: float) -> Case:
    """Return the case with a batch at which the hand-written step takes about `target` seconds."""
    while True:
        step = by_hand(case)
        taken = statistics.median([seconds(step, case) for _ in range(9)][2:])
        if taken >= target * 0.9:
            return case
        more = int(case.size * min(2.0, target / taken))
        case = replace(case, size=max(case.size + 1, more))


def one_round(case: Case, steps: int, *, profile_first: bool) -> tuple[float, float]:
    """Return the median step of both sides, by profile and by hand."""
    order = [by_profile, by_hand] if profile_first else [by_hand, by_profile]
    sides = {make: make(case) for make in order}
    ours, theirs = sides[by_profile], sides[by_hand]
    times: dict[Step, list[float]] = {ours: [], theirs: []}
    for _ in range(5):
        ours()
        theirs()
    gc.disable()
    for index in range(steps):
        pair = (ours, theirs) if index % 2 else (theirs, ours)
        for step in pair:
            times[step].append(seconds(step, case))
    gc.enable()
    return statistics.median(times[ours]), statistics.median(times[theirs])


def some_rounds(case: Case, steps: int, rounds: int) -> list[tuple[float, float]]:
    return [one_round(case, steps, profile_first=bool(i % 2)) for i in range(rounds)]


def rounds_that_tell(
    case: Case, steps: int, rounds: int
) -> tuple[list[tuple[float, float]], Ratio]:
    """Rounds until their interval lies on one side of what is promised, and their ratio."""
    medians: list[tuple[float, float]] = []
    while True:
        medians += some_rounds(case, steps, rounds)
        ratio = paired_ratio([ours for ours, _ in medians], [theirs for _, theirs in medians])
        undecided = ratio.low <= PROMISED < ratio.high
        if not undecided or len(medians) >= _MOST * rounds:
            return medians, ratio


def microseconds(medians: list[tuple[float, float]]) -> float:
    return statistics.median(ours - theirs for ours, theirs in medians) * 1e6


def measure(
    policy: Policy, target: float, *, rounds: int, budget: float, device: str = "cpu"
) -> Result:
    width = WIDTHS[policy] if device == "cpu" else WIDTH_ELSEWHERE
    case = grown(Case(policy, width, 4, device), target)
    steps = max(10, int(budget / target / 2))
    medians, ratio = rounds_that_tell(case, steps, rounds)
    smallest = Case(policy, 8, 2, device)
    return Result(
        policy=policy.value,
        batch_size=case.size,
        step_milliseconds=statistics.median(theirs for _, theirs in medians) * 1e3,
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        overhead_microseconds=microseconds(medians),
        fixed_microseconds=microseconds(some_rounds(smallest, 500, 3)),
        rounds=ratio.rounds,
        steps=steps,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="torch's name for it, such as cuda")
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
                policy,
                target / 1e3,
                rounds=arguments.rounds,
                budget=arguments.seconds,
                device=arguments.device,
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
