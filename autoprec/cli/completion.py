"""`--print-completion SHELL`: a script that completes the command line, made by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, cast

from autoprec.cli.parser import Parser

SHELLS = ("bash", "zsh", "tcsh")

#: An argument of these names (FILE, or FILE.html) takes a file's name, of these a folder's.
_FILES, _FOLDERS = {"A", "B", "FILE", "PLACE", "PROFILE", "STUDY", "TASK"}, {"FOLDER"}


class PrintCompletion(argparse.Action):
    """Prints the script for the parser that it was added to, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the script for the shell `values`."""
        import shtab

        from autoprec.tuning.options import Options
        from autoprec.tuning.settings import settings_of

        choices = {each.name: each.choices for each in settings_of(Options)}
        for action in cast(Parser, parser).actions():
            action.choices = action.choices or choices.get(action.dest) or None
            kind = _kind_of(action)
            if kind is not None:
                action.complete = kind  # type: ignore[attr-defined]
        print(shtab.complete(parser, str(values)))
        parser.exit(0)


def _kind_of(action: argparse.Action) -> Any:
    """Return what shtab is to complete an argument with besides its choices; None: nothing."""
    import shtab

    names = action.metavar if isinstance(action.metavar, tuple) else (action.metavar,)
    words = {(name or "").partition(".")[0] for name in names}
    if words & _FILES:
        return shtab.FILE
    return shtab.DIRECTORY if words & _FOLDERS else None
