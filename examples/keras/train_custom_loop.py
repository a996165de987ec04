"""The guide's model in a hand-written loop: GradientTape, loss scaling, skip counting.

    autoprec tune examples/keras/guide_mlp.py
    python examples/keras/train_custom_loop.py

`precision.scale_loss` and `precision.apply_gradients` do nothing special where the policy needs no
loss scale, so that the same lines serve float32, bfloat16 and float16.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import keras
import tensorflow as tf
from guide_mlp import build_data, build_model, evaluate

from autoprec import apply_profile

PROFILE = Path(__file__).with_name("guide_mlp.profile.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the guide's model in a loop of one's own.")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="file or folder of profiles")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    if not arguments.profile.exists():
        parser.error(f"no {arguments.profile}: run `autoprec tune examples/keras/guide_mlp.py`")

    keras.utils.set_random_seed(0)
    model = build_model()
    optimizer = keras.optimizers.RMSprop(1e-4)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    precision = apply_profile(arguments.profile, model=model, optimizer=optimizer)
    print(f"recipe: {precision.policy} at batch {precision.batch_size}", flush=True)

    @tf.function
    def train_step(images: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(classes, model(images, training=True))
            scaled_loss = precision.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        precision.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for step, (images, classes) in enumerate(
        islice(build_data(precision.batch_size), arguments.steps)
    ):
        loss = train_step(images, classes)
        if step % 20 == 0:
            print(f"step {step}: loss {float(loss):.4f}")
    print(f"accuracy {evaluate(model):.1%}, steps skipped for overflow: {precision.skipped}")


if __name__ == "__main__":
    main()
