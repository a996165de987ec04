"""Finds the equal blocks that a model is a stack of: compiled one by one they share one graph.

What the compiler would guard on has to be the same in each: classes, shapes, and the numbers and
flags that the code may branch on. So have the hooks inside of a block, on which it does not guard:
the graph of another block would leave them out. A block's own hooks run outside of its graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import nn

#: Fewer blocks than these save no seconds worth having.
_FEWEST = 4

#: Of the model's weights, this share must be in the blocks.
_SMALLEST_SHARE = 0.5

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_PLAIN = (bool, int, float, str, tuple, type(None))


def equal_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that make up most of `model` and compile alike; else ()."""
    stacks: dict[tuple[str, Hashable], list[str]] = {}
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if any(True for _ in child.children()) and _size(child):
                inside = f"{path}.{name}" if path else name
                stacks.setdefault((path, _signature(child)), []).append(inside)
    found = [paths for paths in stacks.values() if len(paths) >= _FEWEST]

    def weights(paths: list[str]) -> int:
        return sum(_size(model.get_submodule(path)) for path in paths)

    largest = max(found, key=weights, default=[])
    return tuple(largest) if weights(largest) >= _SMALLEST_SHARE * _size(model) else ()


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not nn.parameter.is_lazy(p))


def _signature(block: nn.Module) -> Hashable:
    return tuple(
        (path, type(module), tuple(_plain(module)), tuple(_tensors(module)), _hooks(path, module))
        for path, module in block.named_modules()
    )


def _plain(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what code may branch on; of other objects the name or the class."""
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "forward":
            continue
        if isinstance(value, _PLAIN):
            yield name, repr(value)
        else:
            yield name, str(getattr(value, "__qualname__", type(value).__qualname__))


def _hooks(path: str, module: nn.Module) -> Hashable:
    return tuple(tuple(vars(module).get(kind, {}).values()) for kind in _HOOKS if path)


def _tensors(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    for name, tensor in own:
        yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
