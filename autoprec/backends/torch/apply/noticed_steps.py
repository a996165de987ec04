"""Tells of every optimizer's steps, and warns at the line of the loop that made one."""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoprec.backends.torch.apply.seen_calls import is_ours
from autoprec.errors import AutoprecWarning

_SILENCE = "To silence: filter autoprec.errors.AutoprecWarning"

_NOTICING: weakref.WeakSet[Any] = weakref.WeakSet()
_HOOK: list[Any] = []  # torch's handle of the one hook for the steps of all optimizers


def notice_steps(check: Any) -> None:
    """Call `check.after_step` after every step of any torch optimizer, as long as it lives."""
    _NOTICING.add(check)
    if not _HOOK:
        _HOOK.append(register_optimizer_step_post_hook(_after_any_step))


def ignore_steps(check: Any) -> None:
    """Call it no longer."""
    _NOTICING.discard(check)
    _end_idle_hook()


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for check in list(_NOTICING):
        check.after_step(optimizer)
    _end_idle_hook()


def _end_idle_hook() -> None:
    """Remove the hook where no steps are noticed.

    torch may be going through its hooks just now, where only the last one can be removed: one that
    is not does nothing until then.
    """
    if _HOOK and not _NOTICING:
        hooks = _HOOK[0].hooks_dict_ref()
        if hooks is None or next(reversed(hooks), None) == _HOOK[0].id:
            _HOOK.pop().remove()


def warn_of_loop(text: str) -> None:
    """Warn at the line of the loop: the nearest frame that is neither torch's nor ours."""
    level, frame = 1, sys._getframe(0)
    while is_ours(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{text}. {_SILENCE}", AutoprecWarning, stacklevel=level)
