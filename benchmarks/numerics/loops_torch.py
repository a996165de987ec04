"""Loops written by hand: what becomes of a task without autoprec, under torch's own autocast.

The truth of a task must not come from the code that is judged by it. A model's outputs are cast up
to float32, as apply_profile does and as careful loops do; `plain` loops leave them in 16 bits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from autoprec.backends.protocol import Task
from autoprec.core.numerics.traces import Trajectory

NOISE = 2.0**-9

HIGHEST, SEARCHED, BELOW = 2.0**60, 150, 16.0
"""A loss scale is looked for from `HIGHEST` down for `SEARCHED` steps; a run begins `BELOW` times
below the one that is left."""


def train(
    task: Task,
    policy: str,
    *,
    seed: int,
    steps: int,
    batch: int,
    scale: float,
    noisy: bool = False,
    plain: bool = False,
    device: str = "cpu",
) -> Trajectory:
    """Train as torch's AMP examples do; `policy` "float32" has neither autocast nor scaler."""
    torch.manual_seed(seed)
    model = task.build_model().to(device)
    if not plain:
        model.register_forward_hook(_in_float32)
    if noisy:
        _perturb(model, seed)
    optimizer = task.build_optimizer(model) if task.build_optimizer else _adamw(model)
    scaler = torch.amp.GradScaler(device, init_scale=scale, enabled=policy == "float16")
    losses: list[float | None] = []
    skipped, scales = [], []
    torch.manual_seed(seed)
    stream = _endless(task, batch)
    for step in range(steps):
        taken = next(stream)
        _seed(seed * 1_000_003 + step, device)
        loss = _loss(task, model, _moved(taken, device), policy, device)
        value = float(loss.detach())
        losses.append(value if math.isfinite(value) else None)
        scaler.scale(loss).backward()
        if task.clip_grad_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_grad_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped.append(step)
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return Trajectory(tuple(losses), tuple(skipped), tuple(scales), seed=seed)


def scale_by_hand(task: Task, batch: int, device: str = "cpu") -> float:
    """Let torch's own scaler halve a scale that is too high until steps pass; stay well below."""
    searched = train(
        task, "float16", seed=0, steps=SEARCHED, batch=batch, scale=HIGHEST, device=device
    )
    return searched.scales[-1] / BELOW


def _seed(seed: int, device: str) -> None:
    """As torch.manual_seed, which without a GPU takes a quarter of a small step for noting where.

    It keeps the traceback of every call, for a GPU that may be used later.
    """
    if device == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _in_float32(model: torch.nn.Module, given: Any, outputs: Any) -> Any:
    """Cast 16-bit outputs up, wherever they are in what a model gives."""
    return tree_map_only(torch.Tensor, _up, outputs)


def _up(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 2 else tensor


def _moved(batch: Any, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)


def _loss(task: Task, model: torch.nn.Module, batch: Any, policy: str, device: str) -> torch.Tensor:
    """A training step under autocast as a whole; a loss function outside it, in float32."""
    autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if policy != "float32":
        autocast = torch.autocast(device, dtype=getattr(torch, policy))
    if task.training_step is not None:
        with autocast:
            loss: torch.Tensor = task.training_step(model, batch)
        return loss.float()
    inputs, targets = batch
    with autocast:
        outputs = model(inputs)
    if task.loss_fn is None:
        raise ValueError(f"{task.name} has neither loss_fn nor training_step")
    answer: torch.Tensor = task.loss_fn(_in_float32(model, inputs, outputs), targets)
    return answer


def _endless(task: Task, batch: int) -> Iterator[Any]:
    for _ in itertools.count():
        yield from task.build_data(batch)


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def _perturb(model: torch.nn.Module, seed: int) -> None:
    """Multiply every weight by 1 + uniform(-2**-9, 2**-9)."""
    generator = torch.Generator().manual_seed(7919 + seed)
    for weight in model.parameters():
        noise = NOISE * (2 * torch.rand(weight.shape, generator=generator) - 1)
        weight.mul_(1 + noise.to(weight.device))
