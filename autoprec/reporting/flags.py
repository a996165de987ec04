"""Names settings in messages as the command line does.

The library names a setting as `time_limit`, or with its value as `device=cpu`; whoever typed
`--time-limit` is told of that.
"""

from __future__ import annotations

import re

_SETTING = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


def with_flags(text: str) -> str:
    """Return a message of the library with flags in the place of settings."""
    from autoprec.tuning.options import Arguments
    from autoprec.tuning.settings import settings_of

    flags = {each.name: each.flag for each in settings_of(Arguments)}
    flags |= {"ray": "--ray", "slurm": "--slurm"}

    def flag(setting: re.Match[str]) -> str:
        name, value = setting.groups()
        if name not in flags:
            return setting[0]
        return flags[name] if value is None else f"{flags[name]} {value}"

    return _SETTING.sub(flag, text)
