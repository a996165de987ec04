"""Takes one float32 step of a torch task and says what the task is.

What is learned decides which knobs are worth trying, whether the batch may be split, what the step
should cost, and which modules can be islands. It also finds what would make "float32" a lie: 16-bit
weights, or an autocast the model opens itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoprec.backends.base import Report, Task
from autoprec.backends.memory import can_keep_freed_memory
from autoprec.backends.torch.flops import by_module, counter
from autoprec.backends.torch.fused import fusable
from autoprec.backends.torch.running import (
    batches,
    build_model,
    build_optimizer,
    compute_loss,
    count_samples,
    materialize,
    move,
    seed_everything,
    tensors_in,
)
from autoprec.backends.torch.units import has_own_code
from autoprec.core.measurement import Dimension, TaskFacts, Unit
from autoprec.errors import TaskError

_SPLIT_TOLERANCE = 1e-4
_LOW = (torch.float16, torch.bfloat16)


def describe(
    task: Task,
    *,
    device: str,
    seed: int,
    batch_size: int,
    report: Report,
    software: Mapping[str, str],
) -> TaskFacts:
    """Build the task, take one float32 step, and describe it; see `Backend.describe`."""
    report("data", 0)
    with contextlib.closing(batches(task, batch_size, seed)) as stream:
        batch = move(next(stream), device)
    report("build", 0)
    model = build_model(task, device, seed)
    materialize(task, model, batch, seed)
    report("describe", 0)
    _plain_step(task, model, batch, seed)
    counted, autocasts = _count(task, model, batch, seed)
    saved = _saved_bytes(task, model, batch, seed)
    splittable, why = _splittable(task, model, batch, seed)
    report("describe", 1)
    seconds, share = _one_step(task, model, batch)
    samples = count_samples(batch)
    flops = sum(counted.values())
    parameters = list(model.parameters())
    return TaskFacts(
        framework="torch",
        software=dict(software),
        nominal=batch_size,
        samples=samples,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        batch_size=task.batch_size,
        convolutions=any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in model.modules()),
        recurrent=any(isinstance(m, nn.RNNBase) for m in model.modules()),
        splittable=splittable,
        split_reason=why,
        flops_per_sample=flops / samples if flops else None,
        saved_bytes_per_sample=saved / samples,
        trainable_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        low_precision=_low_precision(model, autocasts),
        step_seconds=seconds,
        optimizer_share=share,
        threads=torch.get_num_threads(),
        keepable_memory=torch.device(device).type == "cpu" and can_keep_freed_memory(),
        has_evaluate=task.evaluate is not None,
        dimensions=tuple(_dimensions(model)),
        units=tuple(_units(model, counted)),
        warnings=tuple(_warnings(model, batch)),
    )


def _plain_step(task: Task, model: nn.Module, batch: Any, seed: int) -> None:
    """Run the user's code once as it is, so that its errors show no frames but its own."""
    seed_everything(seed)
    with _untouched(model):
        compute_loss(task, model, batch, None).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def _count(task: Task, model: nn.Module, batch: Any, seed: int) -> tuple[dict[str, int], set[str]]:
    """Operations by module in one forward and backward pass, and modules run under autocast."""
    autocasts: set[str] = set()
    device_type = next(tensors_in(batch)).device.type

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if torch.is_autocast_enabled(device_type):
                autocasts.add(path)

        return hook

    handles = [m.register_forward_pre_hook(note(path)) for path, m in model.named_modules()]
    seed_everything(seed)
    try:
        with _flops(model) as own, _untouched(model):
            compute_loss(task, model, batch, None).backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return own, autocasts


def _saved_bytes(task: Task, model: nn.Module, batch: Any, seed: int) -> int:
    """Bytes that a forward pass keeps for the backward pass; weights are not among them."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse: it has no storage
            storage = tensor.untyped_storage()
            place, size = storage.data_ptr(), tensor.numel() * tensor.element_size()
            if place not in weights:  # a batch may be a slice of all the data, or one row repeated
                kept[place] = max(kept.get(place, 0), min(size, storage.nbytes()))
        return tensor

    seed_everything(seed)
    with _untouched(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute_loss(task, model, batch, None).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return sum(kept.values())


@contextlib.contextmanager
def _flops(model: nn.Module) -> Iterator[dict[str, int]]:
    """Fill the yielded mapping with operations by module; a failing counter costs nothing."""
    own: dict[str, int] = {}
    mode = counter()
    with mode:
        yield own
    own.update(by_module(mode, model))


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put buffers (BatchNorm's statistics, counters) back as they were."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in kept and kept[name].shape == buffer.shape:
                    buffer.copy_(kept[name])


def _one_step(task: Task, model: nn.Module, batch: Any) -> tuple[float, float]:
    """Seconds of a second optimizer step (the first one warms up), and the optimizer's share.

    The share is 0 where fused kernels are not to be tried.
    """
    optimizer = build_optimizer(task, model)
    seconds = updating = 0.0
    for _ in range(2):
        start = time.perf_counter()
        loss = compute_loss(task, model, batch, None)
        loss.backward()  # type: ignore[no-untyped-call]
        loss.item()
        between = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _synchronize(batch)
        seconds = time.perf_counter() - start
        updating = time.perf_counter() - between
    return seconds, updating / seconds if fusable(optimizer) else 0.0


def _synchronize(batch: Any) -> None:
    """Wait for the device, so that what was launched counts as done."""
    device = next(tensors_in(batch)).device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _splittable(task: Task, model: nn.Module, batch: Any, seed: int) -> tuple[bool, str]:
    """Whether two halves' averaged gradients equal the whole batch's, dropout off."""
    samples = count_samples(batch)
    if samples < 2 or samples % 2:
        return False, f"a batch of {samples} samples has no halves"
    try:
        halves = [_part(batch, samples, 0), _part(batch, samples, 1)]
    except TypeError as problem:
        return False, str(problem)
    with _untouched(model), _without_dropout(model):
        whole = _gradient(task, model, [batch], seed)
        split = _gradient(task, model, halves, seed)
    norm = whole.norm()
    error = float((whole - split).norm() / norm) if norm > 0 else 0.0
    if error <= _SPLIT_TOLERANCE:
        return True, ""
    cause = "BatchNorm, in-batch negatives or a summed loss does this"
    return False, f"two halves' gradients differ from the whole batch's by {error:.1e} ({cause})"


def _gradient(task: Task, model: nn.Module, parts: list[Any], seed: int) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    for part in parts:
        seed_everything(seed)
        (compute_loss(task, model, part, None) / len(parts)).backward()  # type: ignore[no-untyped-call]
    found = [p.grad.detach().double().flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(found) if found else torch.zeros(1, dtype=torch.double)


class _NoDropout(TorchFunctionMode):
    """Makes every functional dropout the identity, attention's too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off while BatchNorm stays in training mode."""
    recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    rates = [module.dropout for module in recurrent]
    for module in recurrent:
        module.dropout = 0.0
    try:
        with _NoDropout():
            yield
    finally:
        for module, rate in zip(recurrent, rates, strict=True):
            module.dropout = rate


def _part(batch: Any, samples: int, index: int) -> Any:
    """Half of a batch: every tensor whose leading dimension counts samples is cut."""
    if isinstance(batch, torch.Tensor):
        if batch.ndim == 0 or batch.shape[0] != samples:
            return batch
        half = samples // 2
        return batch[index * half : (index + 1) * half]
    if isinstance(batch, Mapping):
        return {key: _part(value, samples, index) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_part(value, samples, index) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_part(value, samples, index) for value in batch)
    if isinstance(batch, str | bytes | int | float | None):
        return batch
    raise TypeError(f"a batch holding a {type(batch).__name__} cannot be split")


def _low_precision(model: nn.Module, autocasts: set[str]) -> str:
    found = []
    low = [name for name, p in model.named_parameters() if p.dtype in _LOW]
    if low:
        found.append(f"{len(low)} parameters are kept in 16 bits ({low[0]}, ...)")
    if autocasts:
        where = min(autocasts) or "the model itself"
        found.append(f"the model opens autocast itself (seen in {where})")
    return "; ".join(found)


def _dimensions(model: nn.Module) -> Iterator[Dimension]:
    for path, module in model.named_modules():
        kind = type(module).__name__
        for name in ("in_features", "out_features", "embedding_dim", "hidden_size", "input_size"):
            size = getattr(module, name, None)
            if isinstance(size, int) and isinstance(
                module, nn.Linear | nn.Bilinear | nn.Embedding | nn.RNNBase
            ):
                yield Dimension(path, kind, name, size)
        if isinstance(module, nn.modules.conv._ConvNd):
            yield Dimension(path, kind, "in_channels", module.in_channels)
            yield Dimension(path, kind, "out_channels", module.out_channels)
        if isinstance(module, nn.Embedding):
            yield Dimension(path, kind, "num_embeddings", module.num_embeddings)
        if isinstance(module, nn.MultiheadAttention):
            yield Dimension(path, kind, "embed_dim", module.embed_dim)


def _units(model: nn.Module, own: Mapping[str, int]) -> Iterator[Unit]:
    total = sum(own.values())
    for path, module in model.named_modules():
        if not has_own_code(module):
            continue
        share = own.get(path, 0) / total if total else 0.0
        yield Unit(path, type(module).__name__, share)


def _warnings(model: nn.Module, batch: Any) -> Iterator[str]:
    low = {str(t.dtype) for t in tensors_in(batch) if t.dtype in _LOW}
    if low:
        yield (
            f"build_data yields {', '.join(sorted(low))}: keep inputs in float32 on the CPU and "
            "let the policy cast them"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError("build_model returned a model without trainable parameters")
