"""The list of a tuning's settings in docs/reference.md, from the fields that declare them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from autoprec.tuning.options import Arguments
from autoprec.tuning.settings import Setting, settings_of


def settings() -> Iterator[str]:
    """A list for every heading of the command line's help, those without one first."""
    found = settings_of(Arguments)
    for group in dict.fromkeys(each.group for each in found):
        yield from ["", *([f"### {group.capitalize()}", ""] if group else [])]
        yield from (entry(each) for each in found if each.group == group)
    yield ""


def entry(setting: Setting) -> str:
    """The setting as it is given in Python and on the command line, and what it does."""
    if setting.kept is bool and not setting.optional:
        written = f"`{setting.name}={not setting.default}`"
    else:
        kind = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(setting.given))
        written = f"`{setting.name}` (`{kind}`)"
    options = [f"{setting.flag} {setting.metavar}".strip()]
    if setting.kept is bool and setting.optional:
        options.append(f"--no-{setting.flag.removeprefix('--')}")
    given = ", ".join(f"`{option}`" for option in options)
    return f"- {written}, {given}: {setting.explanation}"
