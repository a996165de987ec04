"""One process of the overhead's: Keras steps with a profile applied, and the same set by hand.

    python -m benchmarks.overhead.keras_steps mixed_bfloat16 fit --milliseconds 5

Both sides train the same model on the same batches: by `fit`, by `train_on_batch`, or in a loop
with a GradientTape. By hand means `keras.config.set_dtype_policy` before the model is built, with
an output in float32, and for float32 nothing at all. Turns of some steps alternate (A B B A), and
the models are built anew for every round. Prints the medians of both sides as JSON.
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

import keras
import numpy as np
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from benchmarks.overhead.fit import Pair

WIDTH, CLASSES, SMALLEST = 128, 10, 4
POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16)
TURNS = 6


@dataclass(frozen=True)
class Case:
    """What both sides train: the policy, how, the batch, and how many steps a turn has."""

    policy: Policy
    way: str
    size: int
    steps: int = 8


Turn = Callable[[], float]
"""Runs the steps of a turn; the seconds of one."""


def build(*, by_hand: Policy | None) -> Any:
    """The model, compiled; in a policy where it is set by hand."""
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32" if by_hand is None else by_hand.value)
    try:
        hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(3)]
        output = keras.layers.Dense(CLASSES, dtype="float32")
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden, output])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(1e-4), loss=loss)
    finally:
        keras.config.set_dtype_policy(before)
    return model


def make(case: Case, *, profile: bool) -> Turn:
    """One side's turn."""
    by_hand = None if profile or case.policy is Policy.FLOAT32 else case.policy
    model = build(by_hand=by_hand)
    if profile:
        apply_profile(Recipe(policy=case.policy), model=model)
    return {"fit": _fit, "train_on_batch": _on_batch, "custom loop": _own_loop}[case.way](
        model, case
    )


def _batch(case: Case) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    inputs = generator.normal(size=(case.size, WIDTH)).astype("float32")
    return inputs, generator.integers(CLASSES, size=len(inputs))


def _fit(model: Any, case: Case) -> Turn:
    """Fit from a dataset of one batch that is put together already.

    With tf.data's autotuning on, the end of an epoch now and then waits until that thread's period
    is over (10 ms, doubled each time), so that a turn of 80 ms takes 143 ms.
    """
    plain = tf.data.Options()
    plain.autotune.enabled = False
    dataset = tf.data.Dataset.from_tensors(_batch(case)).repeat().with_options(plain)

    def turn() -> float:
        start = time.perf_counter()
        model.fit(dataset, steps_per_epoch=case.steps, verbose=0)
        return (time.perf_counter() - start) / case.steps

    return turn


def _on_batch(model: Any, case: Case) -> Turn:
    inputs, targets = _batch(case)

    def turn() -> float:
        start = time.perf_counter()
        for _ in range(case.steps):
            model.train_on_batch(inputs, targets)
        return (time.perf_counter() - start) / case.steps

    return turn


def _own_loop(model: Any, case: Case) -> Turn:
    inputs, targets = (tf.constant(each) for each in _batch(case))
    loss_in_logs = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_in_logs(targets, model(inputs, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    def turn() -> float:
        start = time.perf_counter()
        for _ in range(case.steps):
            loss = step()
        loss.numpy()
        return (time.perf_counter() - start) / case.steps

    return turn


def grown(case: Case, target: float) -> Case:
    """The case with a batch at which a step by hand takes about `target` seconds."""
    while True:
        turn = make(case, profile=False)
        turn()
        taken = statistics.median(turn() for _ in range(3))
        if taken >= target * 0.9:
            return case
        more = int(case.size * min(4.0, target / taken))
        case = replace(case, size=max(case.size + 1, more))


def one_round(case: Case, *, profile_first: bool) -> tuple[float, float]:
    """The median step of both sides, with the profile and by hand."""
    sides = {profile: make(case, profile=profile) for profile in (profile_first, not profile_first)}
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in sides.values():
        turn()
        turn()
    gc.collect()
    gc.disable()
    for index in range(TURNS):
        for profile in (True, False) if index % 2 else (False, True):
            times[profile].append(sides[profile]())
    gc.enable()
    return statistics.median(times[True]), statistics.median(times[False])


def pair(case: Case, target: float, *, rounds: int, budget: float) -> Pair:
    """This process's medians at one length of steps, or at that of the case where it is longer."""
    case = grown(case, target)
    case = replace(case, steps=max(3, int(budget / target / 2 / TURNS)))
    medians = [one_round(case, profile_first=bool(i % 2)) for i in range(rounds)]
    ours, theirs = (statistics.median(side) for side in zip(*medians, strict=True))
    return Pair(target, ours, theirs, case.size)


def main() -> None:
    """Measure one policy and way at every length of steps asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("policy", choices=[policy.value for policy in POLICIES])
    parser.add_argument("way", choices=("fit", "train_on_batch", "custom loop"))
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[5.0])
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    found: list[Pair] = []
    for milliseconds in sorted(arguments.milliseconds):
        target = milliseconds / 1e3
        if found and found[-1].batch_size == SMALLEST and found[-1].theirs >= target:
            continue  # no step is as short: this would be the same again
        size = found[-1].batch_size if found else SMALLEST
        case = Case(Policy(arguments.policy), arguments.way, size)
        found.append(pair(case, target, rounds=arguments.rounds, budget=arguments.seconds))
    print(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    main()
