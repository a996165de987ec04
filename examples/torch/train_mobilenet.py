"""An existing mixed-precision loop, with its lines kept: GradScaler, clipping, resuming.

    autoprec tune examples/torch/mobilenet.py
    python examples/torch/train_mobilenet.py --epochs 3
    python examples/torch/train_mobilenet.py --epochs 6        # goes on where the first stopped

`precision.scaler` is a torch.amp.GradScaler: disabled where the profile's policy needs no scale, so
that the same lines serve float32, bfloat16 and float16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from mobilenet import (
    CLIP_GRAD_NORM,
    build_data,
    build_model,
    build_optimizer,
    evaluate,
    loss_fn,
)

from autoprec import apply_profile

HERE = Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the MobileNet-like net with its profile.")
    parser.add_argument("--profile", type=Path, default=HERE / "mobilenet.profile.yaml")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "mobilenet.checkpoint.pt")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.profile.exists():
        parser.error(f"no {arguments.profile}: run `autoprec tune examples/torch/mobilenet.py`")

    torch.manual_seed(0)
    model = build_model().to(DEVICE)
    optimizer = build_optimizer(model)
    precision = apply_profile(arguments.profile, model=model, optimizer=optimizer)
    scaler = precision.scaler
    print(f"recipe: {precision.policy} at batch {precision.batch_size}", flush=True)

    first = 0
    if arguments.checkpoint.exists():
        checkpoint = torch.load(arguments.checkpoint, map_location=DEVICE, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        precision.load_state_dict(checkpoint["precision"])
        first = checkpoint["epochs"]

    for epoch in range(first, arguments.epochs):
        torch.manual_seed(epoch)  # the same order and dropout, resumed or not
        optimizer.zero_grad(set_to_none=True)
        for index, (inputs, targets) in enumerate(build_data(precision.batch_size), start=1):
            with precision.autocast():
                outputs = model(inputs.to(DEVICE))
            loss = loss_fn(outputs, targets.to(DEVICE))
            scaler.scale(loss / precision.accumulation_steps).backward()
            if index % precision.accumulation_steps:
                continue
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {evaluate(model):.1%}")

        unfinished = arguments.checkpoint.with_suffix(".part")
        torch.save(
            {
                "epochs": epoch + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "precision": precision.state_dict(),
            },
            unfinished,
        )
        unfinished.replace(arguments.checkpoint)  # a stop never leaves half a checkpoint


if __name__ == "__main__":
    main()
