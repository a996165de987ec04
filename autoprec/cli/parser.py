"""The parser: it suggests the most similar word, and makes what is slow only where it is needed."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the most similar word.

    Where a command's options are slow to make, `late` adds them, once they are needed.
    """

    late: Callable[[Parser], None] | None = None

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        """Parse as argparse does, which has a subcommand's parser do this, too."""
        self._add_late()
        return super().parse_known_args(*arguments, **named)

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
        hints = [f"{word}: did you mean {found[0]}?" for word, found in near.items() if found]
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
