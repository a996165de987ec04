"""Counts a step's floating-point operations, with formulas where torch's own are wrong or missing.

torch.utils.flop_counter knows matrix products, convolutions and CUDA's attention kernels;
flop_formulas.py has what it lacks. Of a sparse matrix it counts all zeros, and complex numbers as
real ones. A multiply-add is two operations, of complex numbers eight. Each is counted once: for the
module whose own code ran it.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autoprec.backends.torch.measure.flop_formulas import formulas

#: Whose operations no module does itself; no module has such a path.
OUTSIDE = "."

#: FlopCounterMode's own name of its total.
_TOTAL = "Global"

#: How many products of real numbers make a complex one.
_REAL_PRODUCTS = 4

#: The number of a backward pass where none runs.
_NO_BACKWARD = -1


def _of_tensors(formula: Callable[..., int]) -> Callable[..., int]:
    """Let a formula of shapes count what the tensors say: complex numbers, what is not stored."""

    @functools.wraps(formula)
    def counted(*args: Any, **kwargs: Any) -> int:
        operations = formula(*args, **kwargs)
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        for each in tensors:
            if each.is_sparse or each.is_sparse_csr:
                operations = operations * each._nnz() // max(1, each.numel())
        return operations * (_REAL_PRODUCTS if any(map(torch.is_complex, tensors)) else 1)

    return counted


#: A module and the checkpoint, if any, in which it made nodes.
_Maker = tuple[nn.Module | None, Any]


class _Owners(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells whose own code runs now: the innermost module of a model, in both passes.

    Each operator of the backward pass belongs to the node of the graph that runs it, and nodes are
    numbered as they are made: the module whose code made a node owns its number. No tensor gets a
    hook, so gradients by a pass's own inputs and torch.func are followed as well.

    Each thread numbers its own nodes. Accelerators' backward passes run in threads of their own:
    what they make (a checkpoint's forward pass, run again) is theirs, all else the caller's.

    What a checkpoint runs again outside of any module is the code of who called the checkpoint: its
    hooks on saved tensors tell where one began.
    """

    supports_higher_order_operators = True

    def __init__(self, root: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = set(root.modules())
        self._running: list[tuple[nn.Module, int]] = []
        self._made: dict[int, _Made] = {}
        self._caller = 0
        self._checkpoints: dict[Any, nn.Module | None] = {}
        self._hooks: list[Any] = []

    @property
    def parents(self) -> set[Any]:
        """Return what an operation counts for, as FlopCounterMode asks: the total and its owner."""
        owner = self._owner()
        return {_TOTAL} if owner is None else {_TOTAL, owner}

    def __enter__(self) -> Any:
        self._caller = threading.get_ident()
        self._made = {self._caller: _Made(_next_number())}
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note()
        return func(*args, **(kwargs or {}))

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._note()
        if module in self._known:  # the code of others is their caller's own
            self._running.append((module, torch._C._current_graph_task_id()))

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._note()
        if any(module is running for running, _ in self._running):
            while self._running.pop()[0] is not module:
                pass  # a module that an exception left

    def _note(self) -> None:
        """Give the nodes made since the last note to the module whose code has run since."""
        number, thread = _next_number(), threading.get_ident()
        made = self._made.setdefault(thread, _Made(number))
        checkpoint = _checkpoint()
        if number > made.ends[-1] or (checkpoint and checkpoint not in self._checkpoints):
            owner = self._owner()
            self._checkpoints.setdefault(checkpoint, owner)
            made.ends.append(number)
            made.makers.append((owner, checkpoint))

    def _owner(self) -> nn.Module | None:
        """Return the module whose own code runs; None outside of the model."""
        innermost, began = self._running[-1] if self._running else (None, _NO_BACKWARD)
        node = torch._C._current_autograd_node()
        if node is None or (innermost and began == torch._C._current_graph_task_id()):
            return innermost  # in a backward pass: a checkpoint's forward pass, run again
        callers = self._made[self._caller]
        own = self._made.get(threading.get_ident(), callers)
        number = node._sequence_nr()
        maker, checkpoint = (own if own.holds(number) else callers).maker(number)
        runs_again = checkpoint and _checkpoint() not in (None, checkpoint)
        return self._checkpoints[checkpoint] if runs_again else maker


class _Made:
    """Who made the nodes of one thread's graph, by their numbers from `first` on."""

    def __init__(self, first: int) -> None:
        self.ends: list[int] = [first]
        self.makers: list[_Maker] = [(None, None)]  # of what was there before

    def holds(self, number: int) -> bool:
        """Return whether this thread may have made the node while it was watched."""
        return self.ends[0] <= number < self.ends[-1]

    def maker(self, number: int) -> _Maker:
        """Return whose code made the node, and in which checkpoint; None for what was before."""
        at = bisect.bisect_right(self.ends, number)
        return self.makers[at] if at < len(self.makers) else (None, None)


def _checkpoint() -> Any:
    """Return the hook by which a checkpoint that runs now saves tensors; None where none runs."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    ours = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return hooks[0] if ours else None


def _next_number() -> int:
    """Return the number that the next node of this thread's graph gets."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def count(root: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Return the operations of each module's own code in what `run` does, by module path.

    Those of its children are not among them. What no module of `root` does itself, such as a loss's
    products, is under `OUTSIDE`: the parts sum to torch's total.
    """
    mode = _counter()
    mode.mod_tracker = _Owners(root)  # type: ignore[assignment]
    with mode:
        run()
    counted = {owner: sum(parts.values()) for owner, parts in mode.get_flop_counts().items()}
    total = counted.pop(_TOTAL, 0)
    own = {path: counted.get(module, 0) for path, module in root.named_modules()}
    return {**own, OUTSIDE: total - sum(own.values())}


class _NoOwners:
    """Tells no modules apart. ModuleTracker puts hooks on tensors, which breaks some code."""

    parents = frozenset({_TOTAL})

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def total(run: Callable[[], object]) -> int:
    """Return the operations of what `run` does, whoever does them."""
    mode = _counter()
    mode.mod_tracker = _NoOwners()  # type: ignore[assignment]
    with mode:
        run()
    return int(mode.get_total_flops())


def registry() -> dict[Any, Any]:
    """Return the formulas by operator: torch's own, and those that torch lacks."""
    return dict(_counter().flop_registry)


def _counter() -> FlopCounterMode:
    mode = FlopCounterMode(display=False, custom_mapping=formulas())
    mode.flop_registry = {key: _of_tensors(each) for key, each in mode.flop_registry.items()}
    return mode
