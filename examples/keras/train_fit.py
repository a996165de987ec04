"""Train the guide's model twice with `fit`, in float32 and with its profile, side by side.

    autoprec tune examples/keras/guide_mlp.py
    python examples/keras/train_fit.py

The two take turns epoch by epoch, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import keras
from guide_mlp import build_data, build_model, evaluate

from autoprec import apply_profile

PROFILE = Path(__file__).with_name("guide_mlp.profile.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the guide's model in float32 and tuned.")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="file or folder of profiles")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps in an epoch")
    arguments = parser.parse_args()
    if not arguments.profile.exists():
        parser.error(f"no {arguments.profile}: run `autoprec tune examples/keras/guide_mlp.py`")

    keras.utils.set_random_seed(0)
    plain = build_model()
    keras.utils.set_random_seed(0)
    tuned = build_model()
    # On a built model the policy is set layer by layer. In a script of your own, the line
    # `apply_profile("model.profile.yaml")` before the model is built does as well.
    precision = apply_profile(arguments.profile, model=tuned)
    print(f"recipe: {precision.policy} at batch {precision.batch_size}", flush=True)

    runs = {"float32": plain, "tuned": tuned}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    data = {name: build_data(precision.batch_size) for name in runs}
    for _ in range(arguments.epochs):
        for name, model in runs.items():
            start = time.perf_counter()
            model.fit(data[name], steps_per_epoch=arguments.steps, shuffle=False, verbose=0)
            seconds[name].append((time.perf_counter() - start) / arguments.steps)

    print(f"{'':10}{'time per step':>16}{'test accuracy':>16}")
    for name, model in runs.items():
        # The first epoch also traces and compiles.
        step = median(seconds[name][1:] or seconds[name])
        print(f"{name:10}{step * 1e3:>13.1f} ms{evaluate(model):>16.1%}")


if __name__ == "__main__":
    main()
