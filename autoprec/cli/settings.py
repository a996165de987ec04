"""Options of the command line, made from the settings that a tuning has."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from autoprec.tuning.options import Arguments, Options
from autoprec.tuning.settings import Setting, settings_of


def add_settings(
    parser: argparse.ArgumentParser, options: type[Options]
) -> dict[str, argparse._ActionsContainer]:
    """Add an option for every setting; return the groups they are in, by heading."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for each in settings_of(options):
        if each.group not in groups:
            groups[each.group] = parser.add_argument_group(each.group)
        if each.flag != "--":  # what follows that is no option's
            add_setting(groups[each.group], each)
    return groups


def add_setting(parser: argparse._ActionsContainer, setting: Setting | str, text: str = "") -> None:
    """Add the option of one setting, with another help text if one is given."""
    if isinstance(setting, str):
        (setting,) = (each for each in settings_of(Arguments) if each.name == setting)
    how: dict[str, Any] = {"metavar": setting.metavar}
    if setting.kept is bool and setting.optional:
        how = {"action": argparse.BooleanOptionalAction}
    elif setting.kept is bool:
        how = {"action": "store_const", "const": not setting.default}
    elif setting.kept in (int, float):
        how["type"] = partial(_number, setting.kept)
    elif setting.several:
        how["action"] = "append"
    parser.add_argument(
        setting.flag,
        *filter(None, [setting.short]),
        dest=setting.name,
        default=argparse.SUPPRESS,
        help=(text.format(default=setting.default) or setting.explanation).replace("%", "%%"),
        **how,
    )


def settings_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given, by name, as they were written."""
    given = vars(arguments)
    return {each.name: given[each.name] for each in settings_of(Options) if each.name in given}


def _number(kind: type[int | float], text: str) -> int | float | str:
    """Return the number; what is none is left to the options, which say what they expected."""
    try:
        return kind(text)
    except ValueError:
        return text
