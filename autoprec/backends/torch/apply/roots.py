"""Finds the module that a recipe's paths start at inside the model that a trainer holds.

A profile names modules as they are called in the model that was tuned. A trainer may hold that
model as a part of another one: of a LightningModule, or under PEFT's prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError


def recipe_paths(recipe: Recipe) -> tuple[str, ...]:
    """Return the paths of parts that a recipe names, each once; the whole model is no part."""
    named = (*recipe.float32_modules, *recipe.alignment.modules)
    return tuple(path for path in dict.fromkeys(named) if path)


def find_root(
    model: nn.Module, paths: Collection[str], *, part: str | None = None, holds: bool = False
) -> nn.Module:
    """Return the module at which all `paths` are found: the model, or one part of it.

    `part` names it; else it is the model itself, or the only part that has all of them. Where there
    is no path it is the model, or, if the model only `holds` the one that is trained (a
    LightningModule), its only child with parameters. Raises `UsageError` where none fits, or
    several do.
    """
    top = unwrap(model)
    if part is not None:
        return _named_part(top, part, paths)
    if not paths:
        return (_only_child(top) if holds else None) or top
    if _has(top, paths):
        return top
    found = {id(unwrap(child)): (name, unwrap(child)) for name, child in top.named_children()}
    fitting = [each for each in found.values() if _has(each[1], paths)]
    if not fitting:
        fitting = [each for each in _below(top) if _has(each[1], paths)]
    if len(fitting) == 1:
        return fitting[0][1]
    if fitting:
        names = ", ".join(repr(name) for name, _ in fitting)
        raise UsageError(
            f"the profile's modules ({_some(paths)}) are found in several parts of "
            f"{type(top).__name__}: {names}. Say which one was tuned, such as "
            f"part={fitting[0][0]!r}"
        )
    raise UsageError(
        f"the profile names {_missing(top, paths)!r}, and neither {type(top).__name__} nor a part "
        "of it has such a module. Was the profile made for another model? Tune again, or name the "
        "part that was tuned with part="
    )


def _named_part(top: nn.Module, part: str, paths: Collection[str]) -> nn.Module:
    known = dict(top.named_modules())
    if part not in known:
        children = ", ".join(repr(name) for name, _ in top.named_children())
        raise UsageError(
            f"part={part!r} given, and {type(top).__name__} has no such module: expected one of "
            f"{children}"
        )
    root = unwrap(known[part])
    if not _has(root, paths):
        raise UsageError(
            f"part={part!r} has no module {_missing(root, paths)!r}, which the profile names. Was "
            "the profile made for another model? Tune again, or correct part="
        )
    return root


def _only_child(top: nn.Module) -> nn.Module | None:
    """Return the child that has all parameters, if there is just one."""
    if next(top.parameters(recurse=False), None) is not None:
        return None
    trained = [each for each in top.children() if next(each.parameters(), None) is not None]
    return unwrap(trained[0]) if len(trained) == 1 else None


def _below(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen = {id(top)}
    for name, module in top.named_modules():
        inner = getattr(module, "_orig_mod", None)
        if id(module) not in seen and not isinstance(inner, nn.Module):
            seen.add(id(module))
            yield name, module


def _has(root: nn.Module, paths: Collection[str]) -> bool:
    known = {name for name, _ in root.named_modules(remove_duplicate=False)}
    return all(path in known for path in paths)


def _missing(root: nn.Module, paths: Collection[str]) -> str:
    known = {name for name, _ in root.named_modules(remove_duplicate=False)}
    return next(path for path in paths if path not in known)


def _some(paths: Collection[str]) -> str:
    shown = list(paths)[:3]
    return ", ".join(shown) + (", ..." if len(paths) > len(shown) else "")
