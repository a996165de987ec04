"""One process of the overhead's: PyTorch steps through `Precision`, and the same written by hand.

    python -m benchmarks.overhead.torch_steps mixed_bfloat16 --milliseconds 1 5

Both sides train the same model on the same batch with the same optimizer, gradient clipping and
(for float16) loss scaling: one through `Precision`, the other with torch.autocast and
torch.amp.GradScaler as PyTorch's own AMP recipe writes it. Steps alternate in a round (A B B A),
so that a machine that drifts drifts for both; every round builds both models anew, in turn, so that
where memory happens to lie favours neither. Prints the medians of both sides as JSON.

With `--watched` a loop whose checks during training are on is compared with one without: its steps
between the checks, for the median of all is of those.

The batch is grown until the hand-written step takes about the time asked for. On an accelerator the
layers are wider, and every step is waited for.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoprec.backends.torch.devices import synchronize
from autoprec.backends.torch.dtypes import autocast_dtype
from autoprec.backends.torch.surgeon import TorchSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.watch_settings import EVERY
from benchmarks.overhead.fit import Pair

WIDTHS = {Policy.FLOAT32: 256, Policy.MIXED_BFLOAT16: 64, Policy.MIXED_FLOAT16: 16}
NARROW, SHORT = 16, 0.002  # layers that leave a step of so few seconds possible
WIDTH_ELSEWHERE = 2048  # of an accelerator's layers, which narrow ones would leave idle
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """What both sides train: the policy, how wide the layers are, the batch, and where.

    `watched` compares a loop with checks with one without, both through a profile.
    """

    policy: Policy
    width: int
    size: int
    device: str
    watched: bool = False


@dataclass(frozen=True)
class Result:
    """One case in one process: how much longer a step takes through `Precision`."""

    policy: str
    batch_size: int
    step_milliseconds: float
    ratio: float
    low: float
    high: float
    overhead_microseconds: float
    rounds: int
    steps: int


Step = Callable[[], object]
Medians = list[tuple[float, float]]


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
    """The loop without autoprec; in float32 it is plain, with nothing of AMP's in it."""
    model, optimizer = build(case)
    inputs, targets = batch(case)
    if case.policy is Policy.FLOAT32:

        def plain() -> None:
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return plain
    dtype, scaled = autocast_dtype(case.policy), case.policy.needs_loss_scale
    scaler = torch.amp.GradScaler(case.device, init_scale=1024.0, enabled=scaled)

    def step() -> None:
        with torch.autocast(case.device, dtype):
            outputs = model(inputs)
        loss = cross_entropy(outputs.float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def by_watched_profile(case: Case) -> Step:
    """The same loop with checks."""
    return by_profile(case, watch=True)


def by_profile(case: Case, *, watch: bool = False) -> Step:
    """The loop as docs/apply-pytorch.md has it, step by step."""
    model, optimizer = build(case)
    inputs, targets = batch(case)
    scale = LossScale(initial=1024.0) if case.policy.needs_loss_scale else None
    recipe = Recipe(policy=case.policy, loss_scale=scale)
    surgeon = TorchSurgeon()
    precision = surgeon.apply(recipe, model=model, optimizers=(optimizer,), device=case.device)
    if watch:
        surgeon.watch(precision, model=model, device=case.device, action="warn", every=EVERY)

    def step() -> None:
        with precision.autocast():
            outputs = model(inputs)
        loss = cross_entropy(outputs, targets)
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
    with_it: Callable[[Case], Step] = by_watched_profile if case.watched else by_profile
    without: Callable[[Case], Step] = by_profile if case.watched else by_hand
    order = [with_it, without] if profile_first else [without, with_it]
    sides = {make: make(case) for make in order}
    ours, theirs = sides[with_it], sides[without]
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


def rounds_of(
    policy: Policy, target: float, *, rounds: int, budget: float, device: str, watched: bool = False
) -> tuple[Case, int, Medians]:
    """The case whose step takes about `target` seconds, and both sides' medians of every round."""
    wide = WIDTHS[policy] if target >= SHORT else NARROW
    width = wide if device == "cpu" else WIDTH_ELSEWHERE
    case = grown(Case(policy, width, 4, device, watched), target)
    steps = max(10, int(budget / target / 2))
    return case, steps, [one_round(case, steps, profile_first=bool(i % 2)) for i in range(rounds)]


def pair(policy: Policy, target: float, **how: Any) -> Pair:
    """This process's medians at one length of steps; `how` is that of `rounds_of`."""
    case, _, medians = rounds_of(policy, target, **how)
    ours, theirs = (statistics.median(side) for side in zip(*medians, strict=True))
    return Pair(target, ours, theirs, case.size)


def measure(
    policy: Policy, target: float, *, rounds: int, budget: float, device: str = "cpu"
) -> Result:
    """One case in this process alone, with the interval over its rounds."""
    case, steps, medians = rounds_of(policy, target, rounds=rounds, budget=budget, device=device)
    ours, theirs = ([*side] for side in zip(*medians, strict=True))
    ratio = paired_ratio(ours, theirs)
    return Result(
        policy=policy.value,
        batch_size=case.size,
        step_milliseconds=statistics.median(theirs) * 1e3,
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        overhead_microseconds=1e6 * statistics.median(a - b for a, b in medians),
        rounds=ratio.rounds,
        steps=steps,
    )


def main() -> None:
    """Measure one policy at every length of steps asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("policy", choices=[policy.value for policy in WIDTHS])
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[5.0, 20.0])
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="torch's name for it, such as cuda")
    parser.add_argument("--watched", action="store_true", help="what checks during training cost")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = [
        pair(
            Policy(arguments.policy),
            target / 1e3,
            rounds=arguments.rounds,
            budget=arguments.seconds,
            device=arguments.device,
            watched=arguments.watched,
        )
        for target in arguments.milliseconds
    ]
    print(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    main()
