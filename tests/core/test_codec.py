"""What must hold of the codec: round trips, and strictness that says where and what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.codec import (
    DecodeError,
    abbreviate,
    bounded,
    did_you_mean,
    from_plain,
    join_path,
    to_plain,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    number: int = bounded(default=1, low=0, high=10)
    ratio: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    colours: tuple[Colour, ...] = ()
    pair: tuple[int, str] = (0, "")
    table: Mapping[str, Inner] = field(default_factory=dict)
    by_colour: Mapping[Colour, int] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    maybe: int | None = None
    either: Inner | str = ""
    mode: Literal["on", 1] = "on"
    flag: bool = False
    anything: object = None
    loose: Any = None


@dataclass(frozen=True)
class Picky:
    value: int

    def __post_init__(self) -> None:
        if self.value == 13:
            raise ValueError("13 is not allowed")
        if self.value == 14:
            raise DecodeError("value", "14 neither")


@dataclass(frozen=True)
class Needs:
    value: int = bounded(low=1, high=2)


inners = st.builds(
    Inner,
    number=st.integers(0, 10),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
)
outers = st.builds(
    Outer,
    name=st.text(),
    inner=inners,
    colours=st.lists(st.sampled_from(Colour)).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    table=st.dictionaries(st.text(), inners),
    by_colour=st.dictionaries(st.sampled_from(Colour), st.integers()),
    names=st.frozensets(st.text()),
    maybe=st.none() | st.integers(),
    either=inners | st.text(),
    mode=st.sampled_from(["on", 1]),
    flag=st.booleans(),
    anything=st.none() | st.booleans() | st.text(),
    loose=st.lists(st.integers()),
)


@settings(deadline=None)
@given(outers)
def test_whatever_is_written_reads_back_the_same(value):
    assert from_plain(Outer, to_plain(value)) == value


@settings(deadline=None)
@given(outers)
def test_what_is_written_is_plain(value):
    def plain(item):
        if isinstance(item, dict):
            return all(type(key) is str and plain(each) for key, each in item.items())
        if isinstance(item, list):
            return all(map(plain, item))
        return item is None or type(item) in (str, int, float, bool)

    assert plain(to_plain(value))


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "the top level: the key 'name' is missing"),
        ("x", "the top level: 'x' given, expected a mapping with Outer's keys"),
        ({"name": "a", "nane": "b"}, r"nane: unknown key; did you mean 'name'\?"),
        ({"name": "a", 7: "b"}, r"7: unknown key \(known: name, "),
        ({"name": 1}, "name: 1 given, expected text"),
        ({"name": "a", "flag": 1}, "flag: 1 given, expected true or false"),
        ({"name": "a", "maybe": True}, "maybe: True given, expected an integer"),
        ({"name": "a", "inner": {"number": 11}}, r"inner.number: 11 given, .* from 0 to 10"),
        ({"name": "a", "inner": {"ratio": "1"}}, "inner.ratio: '1' given, expected a number"),
        ({"name": "a", "inner": {"ratio": float("nan")}}, "inner.ratio: nan .* finite"),
        ({"name": "a", "inner": {"ratio": 10**400}}, "inner.ratio: an integer too large"),
        ({"name": "a", "colours": "red"}, "colours: 'red' given, expected a list"),
        (
            {"name": "a", "colours": ["rde"]},
            r"colours\[0\]: 'rde' .* red, blue; did you mean 'red'",
        ),
        ({"name": "a", "colours": [3]}, r"colours\[0\]: 3 given, expected one of red, blue"),
        ({"name": "a", "pair": [1]}, "pair: 1 items given, expected 2"),
        ({"name": "a", "pair": [1, 2]}, r"pair\[1\]: 2 given, expected text"),
        ({"name": "a", "table": []}, "table: list given, expected a mapping"),
        ({"name": "a", "table": {"x": {"numbr": 1}}}, "table.x.numbr: unknown key; did you mean"),
        (
            {"name": "a", "by_colour": {"green": 1}},
            "by_colour.green: 'green' given, expected one of",
        ),
        ({"name": "a", "either": {"numbr": 1}}, "either.numbr: unknown key"),
        ({"name": "a", "either": 5}, "either: 5 given, expected one of Inner, str"),
        ({"name": "a", "mode": "off"}, "mode: 'off' given, expected one of on, 1"),
        ({"name": "a", "mode": True}, "mode: True given, expected one of on, 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(plain, message):
    with pytest.raises(DecodeError, match=f"^{message}"):
        from_plain(Outer, plain)


def test_an_integer_is_a_number_but_not_the_other_way_round():
    assert from_plain(Inner, {"ratio": 1}) == Inner(ratio=1.0)
    assert type(from_plain(Inner, {"ratio": 1}).ratio) is float
    with pytest.raises(DecodeError, match=r"number: 1.0 given, expected an integer"):
        from_plain(Inner, {"number": 1.0})


def test_none_is_read_only_where_it_is_allowed():
    assert from_plain(Outer, {"name": "a", "maybe": None}).maybe is None
    with pytest.raises(DecodeError, match="name: None given, expected text"):
        from_plain(Outer, {"name": None})


def test_a_constructor_that_refuses_is_told_with_its_place():
    with pytest.raises(DecodeError, match=r"^here: 13 is not allowed$"):
        from_plain(Picky, {"value": 13}, "here")
    with pytest.raises(DecodeError, match=r"^value: 14 neither"):
        from_plain(Picky, {"value": 14}, "here")


def test_a_bound_without_default_makes_the_key_required():
    with pytest.raises(DecodeError, match="'value' is missing"):
        from_plain(Needs, {})
    with pytest.raises(DecodeError, match="from 1 to 2"):
        from_plain(Needs, {"value": 3})


def test_a_type_that_no_file_holds_is_named_as_it_is():
    with pytest.raises(DecodeError, match="expected <class 'complex'>"):
        from_plain(complex, 1)


def test_a_class_is_not_taken_for_its_instance():
    assert to_plain(Outer) is Outer


def test_frozen_sets_are_written_sorted():
    assert to_plain(frozenset({"b", "a"})) == ["a", "b"]


@settings(deadline=None)
@given(st.text() | st.integers() | st.binary() | st.lists(st.integers()))
def test_shown_values_are_short_and_printable(value):
    assert len(abbreviate(value)) <= 60
    assert abbreviate(value).isprintable()


@settings(deadline=None)
@given(st.text())
def test_paths_are_printable_whatever_the_key(key):
    assert join_path("a", key).isprintable()
    assert join_path("", key).isprintable()


def test_only_near_names_are_suggested():
    assert did_you_mean("alpa", ["alpha", "beta"]) == "; did you mean 'alpha'?"
    assert did_you_mean("zzz", ["alpha"]) == ""
    assert did_you_mean("x" * 100, ["x" * 99]) == ""
    assert did_you_mean(3, ["alpha"]) == ""


def test_a_path_travels_as_text():
    assert to_plain({"file": Path("a/b")}) == {"file": "a/b"}
    assert from_plain(tuple[Path, ...], ["a/b"]) == (Path("a/b"),)
    with pytest.raises(DecodeError, match="3 given, expected a path"):
        from_plain(Path, 3)
