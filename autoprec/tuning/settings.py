"""What a setting is: a field of a frozen dataclass that says all there is to say of it.

From the field follow the keyword of `tune` with its type, the option of the command line, the entry
in docs/reference.md, what is refused and in which words, and whether another value of it is another
study. The settings themselves are in options.py.
"""

from __future__ import annotations

import dataclasses
import numbers
import typing
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from autoprec.core.codec import did_you_mean, from_plain, to_plain
from autoprec.errors import UsageError

Given = TypeVar("Given")
Kept = TypeVar("Kept")

_KEY = "autoprec.setting"


class Read(Generic[Given, Kept]):
    """The type of a field that is given as one type and kept as another.

    A type checker takes the first for the parameter of `__init__`; at run time it is the second.
    """

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type | None = None) -> Kept: ...
        def __set__(self, instance: object, value: Given) -> None: ...

    else:

        def __class_getitem__(cls, kinds: tuple[Any, Any]) -> Any:
            return Annotated[kinds[1], kinds[0]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a field says of itself, and in the end what it is: its name and types.

    `metavar` stands for the value on the command line, and `group` is the heading there. `option`
    is what it is called there if not by its name, `short` its letter; it may be given `several`
    times. `suggested` are the values that most give. `read_as` turns what a caller may write into
    the field's type; it raises `UsageError`, or `TypeError` or `ValueError` for the usual message.
    A number has to be `above` another; `expected` says in other words what is expected. With
    another value a `new` study begins, or a finished study runs again for a new result. `given` is
    the type that a caller may write, `kept` the field's own, without None.
    """

    default: object
    metavar: str = ""
    group: str = ""
    option: str = ""
    short: str = ""
    several: bool = False
    read_as: Callable[[Any], object] = lambda value: value
    above: float | None = None
    suggested: tuple[str, ...] = ()
    expected: str = ""
    new: Literal["study", "result", ""] = ""
    help: str = ""
    name: str = ""
    given: Any = None
    kept: Any = None
    optional: bool = False

    def says(self, text: str) -> Any:
        """Return the dataclass's field, with its help, which may name {default} and {choices}."""
        made = dataclasses.replace(self, help=text)
        return dataclasses.field(default=self.default, metadata={_KEY: made})

    @property
    def flag(self) -> str:
        """Return its option on the command line; what is on by default has one that ends it."""
        no = "no-" if self.default is True else ""
        return self.option or f"--{no}{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the only values it may have, or what is suggested, where they are few."""
        named = typing.get_origin(self.kept) is Literal
        return self.suggested or (typing.get_args(self.kept) if named else ())

    @property
    def explanation(self) -> str:
        """Return its help with its default and its choices filled in."""
        choices = " or ".join(filter(None, [", ".join(self.choices[:-1]), *self.choices[-1:]]))
        return self.help.format(default=self.default, choices=choices)

    def read(self, value: object) -> Any:
        """Return a value as the field keeps it; raise `UsageError` for one that makes no sense."""
        if value is None and self.optional:
            return None
        try:
            found = from_plain(self.kept, _plain(self.read_as(value)))
        except (TypeError, ValueError) as error:
            raise self._refusal(value) from error
        if self.above is not None and not typing.cast(Any, found) > self.above:
            raise self._refusal(value)
        return found

    def _refusal(self, value: object) -> UsageError:
        text = repr(value)
        given = text if len(text) <= 60 else f"{text[:57]}..."
        said = f"`{self.name}` {given} given, expected {self.expected or self._expected()}"
        near = did_you_mean(value, self.choices)
        return UsageError(f"{said}{near or f'; give that, or leave `{self.name}` out'}")

    def _expected(self) -> str:
        above = "" if self.above is None else f" above {self.above:g}"
        return f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.kept] + above


_WORDS: dict[type, str] = {bool: "True or False", int: "an integer", float: "a number"}
_WORDS |= {str: "text", Path: "a path"}


def settings_of(options: type) -> tuple[Setting, ...]:
    """Return the settings that a dataclass has, as they are declared."""
    hints = typing.get_type_hints(options, include_extras=True)
    found = []
    for field in dataclasses.fields(options):
        if _KEY in field.metadata:
            given = kept = hints[field.name]
            if typing.get_origin(kept) is Annotated:
                kept, given = kept.__origin__, kept.__metadata__[0]
            kinds = typing.get_args(kept) if isinstance(kept, UnionType) else (kept,)
            found.append(
                dataclasses.replace(
                    field.metadata[_KEY],
                    name=field.name,
                    given=given,
                    kept=kinds[0],
                    optional=NoneType in kinds,
                )
            )
    return tuple(found)


def _plain(value: object) -> Any:
    """Return a value as plain ones; those of a library (a NumPy integer) lose their class."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return to_plain(value)
    return int(value) if isinstance(value, numbers.Integral) else float(value)
