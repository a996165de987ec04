"""Pads the modules that a recipe names to the device's alignment, and says which it skipped."""

from __future__ import annotations

from torch import nn

from autoprec.backends.torch.apply.change_report import PaddedModule, Skipped
from autoprec.backends.torch.apply.forward_wrappers import install_wrapper
from autoprec.backends.torch.apply.padded_forwards import PADDED_FORMS, PaddedForward, round_up
from autoprec.backends.torch.apply.padding_checks import paddable_sizes, padding_obstacle
from autoprec.core.recipe import Alignment


def pad_modules(
    model: nn.Module, alignment: Alignment
) -> tuple[tuple[PaddedModule, ...], tuple[Skipped, ...]]:
    """Install padding on the modules that `alignment` names; return what was padded and what not.

    A module that cannot be padded is skipped with its reason: the result is right without.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    padded: dict[int, PaddedModule] = {}
    skipped = []
    for path in alignment.modules:
        module = modules.get(path)
        if module is not None and id(module) in padded:
            continue
        reason = padding_obstacle(model, path, alignment.multiple)
        if module is None or reason:
            skipped.append(Skipped(path, "padding", reason))
            continue
        padded[id(module)] = _describe(path, module, alignment.multiple)
        install_wrapper(_wrapper_of(module)(module, alignment.multiple))
    return tuple(padded.values()), tuple(skipped)


def _describe(path: str, module: nn.Module, multiple: int) -> PaddedModule:
    sizes = tuple((name, size, round_up(size, multiple)) for name, size in paddable_sizes(module))
    return PaddedModule(path, type(module).__name__, sizes)


def _wrapper_of(module: nn.Module) -> type[PaddedForward]:
    return next(wrapper for kind, wrapper in PADDED_FORMS if isinstance(module, kind))
