"""The same random numbers whatever the layout and the dtype that they are drawn in.

torch fills a dropout mask, or noise, in the order of memory, and takes other numbers from the
generator for 16-bit dtypes: one seed gives another mask in channels_last, and other noise in
bfloat16. Here every draw is made in float32 and in logical order, then rounded and laid out as it
was asked for. So float32 in the contiguous layout draws what it always draws, and every other run
draws the same. Draws on an own `torch.Generator` take their numbers from it; one that the task's
code holds is seeded before every step as torch's are.

Compiled code cannot be watched: under a dispatch mode Dynamo silently compiles nothing. There the
compiler is told to draw as torch does, and dropout and noise are replaced before it sees them.

Not covered: what draws inside one fused operator (cuDNN's dropout between recurrent layers, the
attention kernels of accelerators), and some draws of compiled code, such as after a convolution.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.backends.torch.dtypes import LOW_DTYPES
from autoprec.backends.torch.train.rng import generator_states

aten = torch.ops.aten

_UNTAGGED = frozenset({"random_"})
"""Operators that draw without torch's tag for it."""

_FUSED = ("_rnn", "attention", "_fused_dropout")
"""Parts of the names of operators that draw inside one kernel, whose numbers cannot be given."""

_INTEGERS = frozenset({"randint", "randint_like", "randperm", "random_"})
"""Operators that draw integers: the same ones in every dtype, so that only the order is fixed."""

_LIKE = {"rand_like": aten.uniform_.default, "randn_like": aten.normal_.default}
"""Operators that fill a tensor laid out like another one, and what fills it."""


class RandomNumbers:
    """Draws alike in all runs of one task that are compared; costs nothing where nothing is drawn.

    The first step shows whether the task draws at all. A later one that does, by the generators'
    state, is the last one without the mode: float32 in the contiguous layout, which runs first,
    draws the same without it.
    """

    def __init__(self) -> None:
        self._drawn: bool | None = None
        self._undrawn: Sequence[torch.Tensor] = ()

    @property
    def drawn(self) -> bool:
        """Return whether a step drew random numbers so far."""
        return self._drawn is True

    @property
    def may_draw(self) -> bool:
        """Return whether a step may draw: unless those so far are known to have drawn nothing."""
        return self._drawn is not False

    def note_seeding(self) -> None:
        """Take the generators' state for one in which nothing is drawn yet: a step seeds them."""
        self._undrawn = generator_states()

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """Draw alike inside: in the forward pass, and where the backward pass repeats it."""
        if self._drawn is False:
            self.note_seeding()
            yield
            self._drawn = not _equal(self._undrawn, generator_states())
            return
        mode = DrawnAlike()
        with mode:
            yield
        self._drawn = self.drawn or mode.seen


def _equal(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


@contextlib.contextmanager
def drawn_alike_compiled() -> Iterator[None]:
    """Let what is compiled and run inside draw as eager code does in float32 and logical order."""
    import torch._inductor.config as inductor

    replaced = (
        *((torch.nn.functional, name) for name in ("dropout", *_FEATURES)),
        *((torch, name) for name in ("rand_like", "randn_like")),
    )
    before = [(owner, name, getattr(owner, name)) for owner, name in replaced]
    new = {
        "dropout": _traced_dropout(()),
        **{name: _traced_dropout(range(2, 5)) for name in _FEATURES},
        "rand_like": _traced_like(torch.rand),
        "randn_like": _traced_like(torch.randn),
    }
    try:
        for owner, name, _ in before:
            setattr(owner, name, new[name])
        with inductor.patch(fallback_random=True):
            yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


_FEATURES = ("dropout2d", "dropout3d")
"""Functions that drop whole channels: one draw for each of the first two dimensions."""


def _traced_dropout(shared: Sequence[int]) -> Callable[..., torch.Tensor]:
    def dropout(
        input: torch.Tensor,  # noqa: A002
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        shape = [1 if axis in shared else size for axis, size in enumerate(input.shape)]
        mask = torch.empty(shape, dtype=torch.float32, device=input.device).bernoulli_(1.0 - p)
        factor = (mask / (1.0 - p) if p < 1.0 else mask).to(input.dtype)
        return input.mul_(factor) if inplace else input * factor

    return dropout


def _traced_like(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def like(
        input: torch.Tensor,  # noqa: A002
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        requires_grad: bool = False,
        **ignored: Any,
    ) -> torch.Tensor:
        made = make(input.shape, dtype=torch.float32, device=device or input.device)
        return made.to(dtype or input.dtype).requires_grad_(requires_grad)

    return like


class DrawnAlike(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes every draw in float32 and in logical order; `seen` says whether there was one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        if not (torch.Tag.nondeterministic_seeded in func.tags or name in _UNTAGGED):
            return func(*args, **kwargs)
        self.seen = True
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if any(map(_is_foreign, tensors)) or any(part in name for part in _FUSED):
            return func(*args, **kwargs)
        return _draw(func, name, args, kwargs)


def _is_foreign(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is not one of plain numbers in strided memory."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return not plain or tensor.is_nested or tensor.layout is not torch.strided


def _draw(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "out" in kwargs:
        return _into(kwargs["out"], name, lambda new: func(*_plain(args), **{**kwargs, "out": new}))
    if name in ("rrelu_with_noise", "rrelu_with_noise_"):
        return _leaky(args, in_place=name.endswith("_"), **kwargs)
    if name.endswith("_"):
        rest = _plain(args[1:])
        return _into(args[0], name, lambda new: func(new, *rest, **kwargs))
    if name == "native_dropout":
        return _dropout(func, *args)
    if name in ("_standard_gamma", "_sample_dirichlet"):
        drawn = _gamma(*_plain(args[:1]), *args[1:], **kwargs)
        drawn = drawn / drawn.sum(-1, keepdim=True) if name == "_sample_dirichlet" else drawn
        return torch.empty_like(args[0]).copy_(drawn)
    if name in _LIKE:
        return _fill_like(name, args[0], kwargs)
    if not any(isinstance(each, torch.Tensor) for each in args):
        return _made(func, name, args, kwargs)
    return _mapped(func, name, args, kwargs)


def _into(target: Any, name: str, draw: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Draw into a float32 tensor in logical order, and copy that into the target."""
    dtype = target.dtype if name in _INTEGERS else _drawn_as(target.dtype)
    new = torch.empty(target.shape, dtype=dtype, device=target.device)
    draw(new)
    copied: torch.Tensor = target.copy_(new)
    return copied


def _fill_like(name: str, like: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    generator = kwargs.get("generator")
    made = torch.empty_like(like, **{k: v for k, v in kwargs.items() if k != "generator"})
    return _into(made, name, lambda new: _LIKE[name](new, generator=generator))


def _made(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor from a size."""
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if name in _INTEGERS or _drawn_as(dtype) is dtype:
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "dtype": torch.float32}).to(dtype)


def _mapped(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw by what tensors say, such as a mean for every element."""
    found = func(*_plain(args, keep=name in _INTEGERS), **kwargs)
    given = [each for each in args if isinstance(each, torch.Tensor)]
    if not (isinstance(found, torch.Tensor) and found.dtype.is_floating_point):
        return found
    if found.shape != given[0].shape:
        return found.to(given[0].dtype)
    dtype = found.dtype if name in _INTEGERS else given[0].dtype
    return torch.empty_like(given[0], dtype=dtype).copy_(found)


def _dropout(func: Any, given: torch.Tensor, p: float, train: bool | None = True) -> Any:
    """Drop out as accelerators do, in one kernel that returns its mask, too."""
    if not train or p in (0.0, 1.0):
        return func(given, p, train)
    drawn = torch.empty(given.shape, dtype=torch.float32, device=given.device).bernoulli_(1.0 - p)
    mask = torch.empty_like(given, dtype=torch.bool).copy_(drawn)
    kept = given.to(_drawn_as(given.dtype)) * mask * (1.0 / (1.0 - p))
    return torch.empty_like(given).copy_(kept), mask


def _leaky(
    args: tuple[Any, ...], *, in_place: bool, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Compute a randomised leaky ReLU; torch draws only where the input is not positive.

    One sign that rounding changes would shift all later draws: here every element has its own.
    """
    given, noise, lower, upper, training, passed = (*args, *_LEAKY_DEFAULTS[len(args) - 2 :])
    if training:
        slopes = torch.empty(given.shape, dtype=torch.float32, device=given.device)
        slopes.uniform_(float(lower), float(upper), generator=generator or passed)
        noise.copy_(torch.where(given > 0, torch.ones_like(slopes), slopes))
        made = given * noise
    else:
        made = torch.nn.functional.leaky_relu(given, (float(lower) + float(upper)) / 2)
    leaky: torch.Tensor = given.copy_(made) if in_place else made
    return leaky


def _gamma(shape: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw from gamma distributions of these shapes and of rate 1 (Marsaglia and Tsang, 2000).

    torch draws for one element after another until a proposal is accepted: one that rounding turns
    down would shift all later draws. Here every element has proposals of its own.
    """
    raised = torch.where(shape < 1.0, shape + 1.0, shape) - 1.0 / 3.0
    proposals = shape.new_empty((_PROPOSALS, *shape.shape)).normal_(generator=generator)
    chances = torch.empty_like(proposals).uniform_(generator=generator)
    lift = shape.new_empty(shape.shape).uniform_(generator=generator)
    cubes = (1.0 + proposals / (9.0 * raised).sqrt()) ** 3
    limits = proposals.square() / 2 + raised * (1.0 - cubes + cubes.log())  # NaN below zero
    places = torch.arange(_PROPOSALS, device=shape.device).view(-1, *[1] * shape.ndim)
    accepted = torch.where(chances.log() < limits, places, _PROPOSALS - 1).amin(0, keepdim=True)
    drawn = raised * cubes.gather(0, accepted)[0]
    return torch.where(shape < 1.0, drawn * lift ** (1.0 / shape), drawn)


_PROPOSALS = 16
"""For one element; each is turned down once in twenty times at most."""

_LEAKY_DEFAULTS: tuple[Any, ...] = (1 / 8, 1 / 3, False, None)


def _plain(args: tuple[Any, ...], *, keep: bool = False) -> tuple[Any, ...]:
    """Return arguments with their tensors in float32 and in logical order."""
    return tuple(
        each.to(each.dtype if keep else _drawn_as(each.dtype)).contiguous()
        if isinstance(each, torch.Tensor)
        else each
        for each in args
    )


def _drawn_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are drawn."""
    return torch.float32 if dtype in LOW_DTYPES else dtype
