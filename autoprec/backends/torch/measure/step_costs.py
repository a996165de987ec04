"""What a training step costs: its operations, and the bytes it keeps for the backward pass.

Both observe a step through hooks that some code does not tolerate: gradients by inputs, torch.func,
nested tensors. That is no fault of the task; what cannot be measured is unknown.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.backends.protocol import Task
from autoprec.backends.shared.attempt import try_to_measure
from autoprec.backends.shared.kernel_counts import KernelCounts
from autoprec.backends.torch.apply.nested_tensors import tensors_in
from autoprec.backends.torch.measure.flops import count, registry, total
from autoprec.backends.torch.train.task_runner import compute_loss, seed_everything
from autoprec.core.measurement import Kernel

_TIMED_PASSES, _LONG_PASS_SECONDS = 5, 0.2


def operations(task: Task, model: nn.Module, batch: Any, seed: int) -> dict[str, int]:
    """Count each module's own operations in one forward and backward pass; see `flops.count`.

    Where torch cannot tell the modules apart they are all the root's own, "".
    """

    def run() -> None:
        run_pass(task, model, batch, seed)

    own, _ = try_to_measure(lambda: count(model, run))
    if own is None:
        own, _ = try_to_measure(lambda: {"": total(run)})
    return own or {}


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator that computes something: its operations and its operands' bytes."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._formulas = registry()
        self.counts = KernelCounts((p.shape for p in model.parameters()), samples)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            formula = self._formulas.get(func.overloadpacket)
            flops = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
            sizes = {True: 0, False: 0}
            for tensor in tensors_in([args, kwargs, result]):
                sizes[self._is_fixed(tensor)] += tensor.numel() * tensor.element_size()
            self.counts.add(int(flops), sizes[False], sizes[True])
        return result

    def _is_fixed(self, tensor: torch.Tensor) -> bool:
        """Return whether it is a weight, or has a weight gradient's shape without a batch size."""
        if self.counts.is_gradient_shape(tensor.shape):
            return True
        return tensor.untyped_storage().data_ptr() in self._weights


def kernels(
    task: Task, model: nn.Module, batch: Any, seed: int, samples: int
) -> tuple[Kernel, ...]:
    """List the kernels that one forward and backward pass runs."""
    counting = _Kernels(model, samples)
    with counting:
        run_pass(task, model, batch, seed)
    return counting.counts.kernels()


class _OperatorTimes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every operator that computes something; `wait` returns when the device is done."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wait = wait
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        self._wait()
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._wait()
        self.seconds[str(func.overloadpacket)] += time.perf_counter() - start
        return result


def slowest_operator(
    task: Task, model: nn.Module, batch: Any, seed: int, wait: Callable[[], None]
) -> tuple[str, float, float]:
    """Return the operator that takes most of a forward and backward pass, its seconds, and all's.

    What else the machine does can only add to a pass, so the least of several counts, unless one
    alone takes long enough to tell.
    """
    least: dict[str, float] = {}
    for _ in range(_TIMED_PASSES):
        timing = _OperatorTimes(wait)
        with timing:
            run_pass(task, model, batch, seed)
        least = {name: min(own, least.get(name, own)) for name, own in timing.seconds.items()}
        if sum(timing.seconds.values()) > _LONG_PASS_SECONDS:
            break
    name, own = max(least.items(), key=lambda item: item[1], default=("", 0.0))
    return name, own, sum(least.values())


def saved_bytes(task: Task, model: nn.Module, batch: Any, seed: int) -> int:
    """Count the bytes a forward pass keeps for the backward pass; weights are not among them."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse: it has no storage
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), tensor.numel() * tensor.element_size()
            if address not in weights:  # a batch may be a slice of all data, or one row repeated
                kept[address] = max(kept.get(address, 0), min(size, storage.nbytes()))
        return tensor.detach()  # an output that kept itself would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_pass(task, model, batch, seed)
    return sum(kept.values())


def run_pass(task: Task, model: nn.Module, batch: Any, seed: int) -> None:
    """Run one forward and backward pass that leaves no trace in the model."""
    seed_everything(seed)
    try:
        with buffers_preserved(model):
            compute_loss(task, model, batch, None).backward()  # type: ignore[no-untyped-call]
    finally:
        model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def buffers_preserved(model: nn.Module) -> Iterator[None]:
    """Put buffers (BatchNorm's statistics, counters) back as they were."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in kept and kept[name].shape == buffer.shape:
                    buffer.copy_(kept[name])
