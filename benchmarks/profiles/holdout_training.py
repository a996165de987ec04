"""One training loop of the hold-out, in a process of its own: with a profile, or as it was.

    python -m benchmarks.profiles.holdout_training TASK.py --profile FILE
    python -m benchmarks.profiles.holdout_training TASK.py --batch 32
    python -m benchmarks.profiles.holdout_training KERAS_TASK.py --batch 128 --policy mixed_bfloat16

For every number of seconds that is read, a line of standard input each, it trains for about as long
and prints the samples per second. A few batches are drawn beforehand and used again, so that no
loader is timed. The loop with a profile is that of docs/apply-pytorch.md; the other one has nothing
of autoprec's. In Keras that one can be told a recipe, by Keras's own means: a dtype policy,
steps_per_execution.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from autoprec import apply_profile, load_profile
from autoprec.workers.task_file import load_task

BATCHES = 4

#: Trains at least so many steps; returns how many.
Steps = Callable[[int], int]


def torch_loop(task: Any, profile: Path | None, batch: int) -> Steps:
    """PyTorch's loop."""
    import torch

    torch.manual_seed(0)
    model = task.build_model()
    make = task.build_optimizer or (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    optimizer, clip = make(model), task.clip_grad_norm
    model.train()
    batches = cycle(list(islice(task.build_data(batch), BATCHES)))
    if profile is not None:
        return _with_profile(task, profile, model, optimizer, batches)

    def loss_of(taken: Any) -> Any:
        if task.training_step is not None:
            return task.training_step(model, taken)
        inputs, targets = taken
        return task.loss_fn(model(inputs), targets)

    def train(steps: int) -> int:
        for _ in range(steps):
            loss_of(next(batches)).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        return steps

    return train


def _with_profile(task: Any, profile: Path, model: Any, optimizer: Any, batches: Any) -> Steps:
    precision = apply_profile(profile, model=model, optimizer=optimizer)
    clip = task.clip_grad_norm

    def loss_of(taken: Any) -> Any:
        if task.training_step is not None:
            with precision.autocast():
                return task.training_step(model, taken)
        inputs, targets = taken
        with precision.autocast():
            outputs = model(inputs)
        return task.loss_fn(outputs, targets)

    def train(steps: int) -> int:
        for _ in range(steps):
            precision.backward(loss_of(next(batches)))
            if clip is not None:
                precision.clip_grad_norm_(clip)
            precision.step()
        return steps

    return train


def keras_loop(
    task: Any, profile: Path | None, batch: int, policy: str = "float32", steps_at_once: int = 0
) -> Steps:
    """Keras's fit, with a profile or with a recipe written by hand; 0 leaves the task's steps."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = task.build_model()
    if steps_at_once:
        model.steps_per_execution = steps_at_once
    if profile is not None:
        apply_profile(profile, model=model)
    data = task.build_data(batch)
    if not isinstance(data, tf.data.Dataset):
        data = tf.data.Dataset.from_tensor_slices(data).batch(batch, drop_remainder=True)
    data = data.take(BATCHES).cache().repeat()

    def train(steps: int) -> int:
        executed_at_once = model.steps_per_execution
        whole = -(-steps // executed_at_once) * executed_at_once
        model.fit(data, steps_per_epoch=whole, verbose=0)
        return whole

    return train


def samples_per_second(train: Steps, batch: int, seconds: float, step: float) -> float:
    """Train for about so many seconds, by what a step took before."""
    steps = max(1, round(seconds / step))
    began = time.perf_counter()
    trained = train(steps)
    return batch * trained / (time.perf_counter() - began)


def main() -> None:
    """Make the loop ready, then train a turn for every line that is read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--policy", default="float32", help="Keras's dtype policy, by hand")
    parser.add_argument("--steps-per-execution", type=int, default=0, help="Keras's, by hand")
    arguments = parser.parse_args()
    batch = arguments.batch
    if arguments.profile is not None:
        batch = load_profile(arguments.profile).recipe.batch_size
    if not batch:
        parser.error("give --profile or --batch")
    task = load_task(arguments.task)
    is_keras = "import keras" in arguments.task.read_text(encoding="utf-8")
    if is_keras:
        by_hand = (arguments.policy, arguments.steps_per_execution)
        train = keras_loop(task, arguments.profile, batch, *by_hand)
    else:
        train = torch_loop(task, arguments.profile, batch)
    train(3)
    began = time.perf_counter()
    trained = train(5)
    step = (time.perf_counter() - began) / trained
    print("ready", flush=True)
    for line in sys.stdin:
        rate = samples_per_second(train, batch, float(line), step)
        step = batch / rate
        print(rate, flush=True)


if __name__ == "__main__":
    main()
