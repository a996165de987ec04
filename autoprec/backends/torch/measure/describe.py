"""Takes one float32 step of a torch task and says what the task is.

What is learned decides which knobs are worth trying, whether the batch may be split, what the step
should cost, and which modules can be islands. It also finds what would make "float32" a lie: 16-bit
weights, or an autocast the model opens itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.attempt import try_to_measure
from autoprec.backends.shared.batch_splits import COMPARED_BATCHES
from autoprec.backends.shared.batch_survey import DESCRIBED
from autoprec.backends.shared.process_memory import can_keep_freed_memory
from autoprec.backends.torch.apply.equal_blocks import equal_blocks
from autoprec.backends.torch.apply.float8_linear import float8_layers
from autoprec.backends.torch.apply.float32_islands import has_own_code
from autoprec.backends.torch.apply.fused_optimizer import can_be_fused
from autoprec.backends.torch.apply.nested_tensors import copy_deeply, tensors_in
from autoprec.backends.torch.dtypes import LOW_DTYPES
from autoprec.backends.torch.measure.batch_splitting import splittable
from autoprec.backends.torch.measure.first_loss_check import check_first_loss
from autoprec.backends.torch.measure.flops import OUTSIDE
from autoprec.backends.torch.measure.observed_calls import attention_length, keeps_outputs
from autoprec.backends.torch.measure.step_costs import (
    kernels,
    operations,
    run_pass,
    saved_bytes,
    slowest_operator,
)
from autoprec.backends.torch.train.batch_dimension import Samples
from autoprec.backends.torch.train.batch_views import marks_of, survey
from autoprec.backends.torch.train.task_precision import (
    computes_in,
    low_precision,
    noted_autocasts,
    rounded_convolutions,
    rounded_products,
)
from autoprec.backends.torch.train.task_runner import (
    build_model,
    build_optimizer,
    compute_loss,
    materialize,
    move,
)
from autoprec.core.device.roofline import EXPLAINING_SHARE
from autoprec.core.measurement import Dimension, TaskFacts, Unit
from autoprec.errors import TaskError


def describe(
    task: Task,
    *,
    device: str,
    seed: int,
    batch_size: int,
    report: ProgressCallback,
    software: Mapping[str, str],
) -> TaskFacts:
    """Build the task, take one float32 step, and describe it; see `Backend.describe`."""
    began, most_seconds = time.monotonic(), task.describing_seconds
    report("data", 0)
    seen, found = survey(task, batch_size, seed, DESCRIBED, compare_halves=True)
    batch = move(seen.kept[seen.typical()], device)
    device_type = torch.device(device).type
    report("build", 0)
    model = build_model(task, device, seed)
    materialize(task, model, batch, seed)
    report("describe", 0)
    task = _checked(task, model, batch, seed)
    with noted_autocasts(model, device_type) as autocasts:
        counted = operations(task, model, batch, seed)
    saved, _ = try_to_measure(lambda: saved_bytes(task, model, batch, seed))
    longest = [seen.kept[index] for index in seen.largest()] if seen.varies else []
    most = [_most_each(task, model, found, each, seed) for each in longest]
    judged = {index: seen.kept[index] for index in seen.representatives(COMPARED_BATCHES)}
    splitting = splittable(
        task, model, judged, found, seed, device=device, report=report, autocasts=bool(autocasts)
    )
    report("describe", 1)
    optimizer = build_optimizer(task, model)
    seconds, updating = _time_one_step(task, model, optimizer, batch, device)
    samples = found.count(batch)
    run, length, kept, operator, operator_share = None, 0, False, "", 0.0
    if most_seconds is None or time.monotonic() - began < most_seconds:
        run, _ = try_to_measure(lambda: kernels(task, model, batch, seed, samples))
        length, kept = _watched(lambda: run_pass(task, model, batch, seed), model)
        operator, operator_share = _slow_operator(task, model, batch, seed, device, seconds)
    flops = sum(counted.values())
    return replace(
        _facts_of_model(task, model, optimizer, device_type, autocasts, batch_size, samples),
        software=dict(software),
        splittable=splitting.allowed,
        split_reason=splitting.reason,
        fixed_batch=splitting.fixed,
        surveyed=seen.batches_to_look_at,
        flops_per_sample=flops / samples if flops else None,
        saved_bytes_per_sample=(saved or 0) / samples,
        most_saved_bytes_per_sample=max((saved for saved, _ in most), default=0.0),
        most_kernel_bytes_per_sample=max((kernel for _, kernel in most), default=0.0),
        kernels=run or (),
        slow_operator=operator,
        slow_operator_share=operator_share,
        step_seconds=seconds,
        update_seconds=updating,
        optimizer_share=updating / seconds if can_be_fused(optimizer) else 0.0,
        attention_length=length,
        keeps_outputs=kept,
        units=tuple(_units(model, counted)),
        warnings=(*_warnings(model, batch, found), *seen.warnings(), *splitting.warnings()),
    )


def _checked(task: Task, model: nn.Module, batch: Any, seed: int) -> Task:
    """Check the first loss without hooks, so that only the user's own errors show.

    Returns the task as the rest is to run it: with copies of a batch where a step writes to it.
    """
    given = copy_deeply(batch)
    before = marks_of(given)
    check_first_loss(task, model, given, seed)
    return replace(task, copies_batches=marks_of(given) != before)


def _facts_of_model(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device_type: str,
    autocasts: Mapping[str, torch.dtype],
    nominal: int,
    samples: int,
) -> TaskFacts:
    """Return what a model and its process tell without another step."""
    parameters = list(model.parameters())
    convolves = any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in model.modules())
    return TaskFacts(
        framework="torch",
        software={},
        nominal=nominal,
        samples=samples,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        trainable_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        optimizer_bytes=_state_bytes(optimizer),
        batch_size=task.batch_size,
        has_evaluate=task.evaluate is not None,
        convolutions=convolves,
        convolutions_in=rounded_convolutions(device_type) if convolves else "",
        uses_tf32=rounded_products(device_type) == "TF32",
        low_precision=low_precision(model, autocasts, device_type),
        weights_in=computes_in(model, autocasts),
        threads=torch.get_num_threads(),
        keepable_memory=device_type == "cpu" and can_keep_freed_memory(),
        float8_layers=float8_layers(model),
        equal_blocks=equal_blocks(model),
        dimensions=tuple(_dimensions(model)),
    )


def _most_each(
    task: Task, model: nn.Module, samples: Samples, given: Any, seed: int
) -> tuple[float, float]:
    """Return the bytes of each sample of a batch that the forward pass keeps, and a kernel moves.

    0 stands for what cannot be counted; of the kernels it is the largest.
    """
    batch, count = move(given, str(next(model.parameters()).device)), samples.count(given)
    saved, _ = try_to_measure(lambda: saved_bytes(task, model, batch, seed))
    run, _ = try_to_measure(lambda: kernels(task, model, batch, seed, count))
    return (saved or 0) / count, max((each.bytes_per_sample for each in run or ()), default=0.0)


def _time_one_step(
    task: Task, model: nn.Module, optimizer: Any, batch: Any, device: str
) -> tuple[float, float]:
    """Time a second training step (the first one warms up), and the optimizer's update in it."""
    seconds = updating = 0.0
    for _ in range(2):
        start = time.perf_counter()
        loss = compute_loss(task, model, batch, None)
        loss.backward()  # type: ignore[no-untyped-call]
        loss.item()
        between = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _synchronize(device)
        seconds = time.perf_counter() - start
        updating = time.perf_counter() - between
    return seconds, updating


def _watched(run: Callable[[], None], model: nn.Module) -> tuple[int, bool]:
    """Return how long attention's rows are, and whether outputs are kept; 0, False: not known."""
    found: list[int] = []
    kept, _ = try_to_measure(
        lambda: keeps_outputs(model, lambda: found.append(attention_length(run)))
    )
    return (found[0], bool(kept)) if found else (0, False)


def _slow_operator(
    task: Task, model: nn.Module, batch: Any, seed: int, device: str, step_seconds: float
) -> tuple[str, float]:
    """Time a step's operators; name the slowest and its share of the step, if it explains that.

    Where the operators took longer than the step did, something disturbed them all.
    """
    timed, _ = try_to_measure(
        lambda: slowest_operator(task, model, batch, seed, lambda: _synchronize(device))
    )
    name, own, of_all = timed or ("", 0.0, 0.0)
    return _named_operator(name, own, max(step_seconds, of_all))


def _named_operator(name: str, operator_seconds: float, step_seconds: float) -> tuple[str, float]:
    """Return the operator and its share of a step; none where that is too small to explain it."""
    share = min(1.0, operator_seconds / step_seconds)
    return (name, share) if share >= EXPLAINING_SHARE else ("", 0.0)


def _state_bytes(optimizer: Any) -> int:
    """Count the bytes of an optimizer's state after a step."""
    kept = tensors_in([dict(state) for state in getattr(optimizer, "state", {}).values()])
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def _synchronize(device: str) -> None:
    """Wait for the device, so that what was launched counts as done."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))


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
    total = sum(count for path, count in own.items() if path != OUTSIDE)
    scripted = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)]
    inside = {id(inner) for module in scripted for inner in module.children()}
    for path, module in model.named_modules():
        if not has_own_code(module) or id(module) in inside:  # TorchScript calls no forward of it
            continue
        share = own.get(path, 0) / total if total else 0.0
        yield Unit(path, type(module).__name__, share)


def _warnings(model: nn.Module, batch: Any, samples: Samples) -> Iterator[str]:
    low = {str(t.dtype) for t in tensors_in(batch) if t.dtype in LOW_DTYPES}
    if low:
        yield (
            f"build_data yields {', '.join(sorted(low))}: keep inputs in float32 on the CPU and "
            "let the policy cast them"
        )
    if samples.warning:
        yield samples.warning
    if not any(p.requires_grad for p in model.parameters()):
        raise TaskError("build_model returned a model without trainable parameters")
