"""What may be said beside the profile, to every trainer alike."""

from __future__ import annotations

from typing import Literal, TypedDict

from autoprec.core.watch_settings import Action


class Settings(TypedDict, total=False):
    """The settings of `apply_profile`, and `part`.

    That names the module that was tuned, such as "net", where the trainer's model holds it and the
    profile's paths do not show which one it is.
    """

    part: str | None
    strict: bool
    fallback: Literal["measured", "rules"]
    watch: Action | Literal[False]
    watch_every: int
