"""Hypothesis strategies for any frozen dataclass of autoprec's, from its fields alone."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from enum import Enum
from functools import cache
from typing import Any

from hypothesis import strategies as st

from autoprec.core import codec
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Profile
from autoprec.core.recipe import FLOAT8, GRAPH_MODES, KNOBS, Recipe

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SCALARS = {
    str: TEXT,
    int: st.integers(-(2**63), 2**63),
    float: FINITE,
    bool: st.booleans(),
    type(None): st.none(),
    object: PLAIN,
    Any: PLAIN,
}

#: Without the modes that a recipe refuses beside accumulation.
KNOB_VALUES = {
    name: st.sampled_from([value for value in knob.values if value not in GRAPH_MODES])
    if knob.values
    else st.integers(knob.low, knob.high)
    for name, knob in KNOBS.items()
}
knobs = st.fixed_dictionaries({}, optional=KNOB_VALUES)


@cache
def values_of(kind: Any, limits: tuple[float, float] | None = None) -> st.SearchStrategy[Any]:
    """Return values that `kind` may hold, within `limits` where they are numbers."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in SCALARS:
        if limits and kind is int:
            return st.integers(int(limits[0]), int(limits[1]))
        return st.floats(*limits) if limits and kind is float else SCALARS[kind]
    if dataclasses.is_dataclass(kind):
        return dataclasses_of(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(each, limits) for each in inner])
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin is tuple and inner[1:] == (...,):
        return st.lists(values_of(inner[0]), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(values_of(inner[0]), max_size=3)
    if origin is collections.abc.Mapping:
        return st.dictionaries(values_of(inner[0]), values_of(inner[1]), max_size=3)
    raise TypeError(f"no strategy for {kind}")


def dataclasses_of(kind: type) -> st.SearchStrategy[Any]:
    """Return instances of a dataclass with every field drawn."""
    hints = typing.get_type_hints(kind)
    fields = {
        field.name: values_of(hints[field.name], field.metadata.get(codec._RANGE_KEY))
        for field in dataclasses.fields(kind)
        if field.init
    }
    if kind is Recipe:
        return st.builds(recipe_of, **{**fields, "knobs": knobs})
    return st.builds(kind, **fields)


def recipe_of(**given: Any) -> Recipe:
    """Build a recipe; with float8 it is one of the few that may hold it."""
    if given["knobs"].get(FLOAT8):
        given |= {"policy": Policy.MIXED_BFLOAT16, "compile": True}
    return Recipe(**given)


profiles: st.SearchStrategy[Profile] = values_of(Profile)
recipes: st.SearchStrategy[Recipe] = values_of(Recipe)
