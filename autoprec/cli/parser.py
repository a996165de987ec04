"""The parser: it suggests the most similar word, makes what is slow only when it is needed, and
prints a script that completes the command line in a shell (made by shtab).
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the most similar word, and whose texts keep their lines.

    If a command's options are slow to make, `late` adds them, once they are needed. What follows
    a "--" is kept as it is under the name `rest`, if there is one.
    """

    late: Callable[[Parser], None] | None = None
    rest = ""

    def __init__(self, **named: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **named)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, which has a subcommand's parser do this, too."""
        self._add_late()
        if not self.rest:
            return super().parse_known_args(args, namespace)
        end = args.index("--") if "--" in args else len(args)
        known, unknown = super().parse_known_args(args[:end], namespace)
        setattr(known, self.rest, args[end + 1 :])
        return known, unknown

    def actions(self) -> Iterator[argparse.Action]:
        """Yield every action of the parser and of its subcommands."""
        self._add_late()
        for action in self._actions:
            yield action
            if isinstance(action, argparse._SubParsersAction):
                for subparser in action.choices.values():
                    yield from subparser.actions()

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        known = [
            str(word)
            for action in self.actions()
            for word in (*action.option_strings, *(action.choices or ()))
        ]
        near = {
            word: difflib.get_close_matches(word, known, n=1) for word in _unknown_words(message)
        }
        hints = [f"{word}: did you mean {similar[0]}?" for word, similar in near.items() if similar]
        super().error("; ".join([message, *hints]))

    def _add_late(self) -> None:
        late, self.late = self.late, None
        if late is not None:
            late(self)


def _unknown_words(message: str) -> list[str]:
    """Return the words that argparse did not know, taken from its message."""
    if message.startswith("unrecognized arguments: "):
        words = message.removeprefix("unrecognized arguments: ").split()
        return [word.partition("=")[0] for word in words if word.startswith("-")]
    return re.findall(r"invalid choice: '([^']*)'", message)


# Completion -------------------------------------------------------------------------------------

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
