"""The JSON Schema of a profile file."""

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from autoprec.core.codec import range_of
from autoprec.core.profile import Profile
from autoprec.core.recipe import KNOBS, Knob, Recipe

_SCALARS: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}

Override = Mapping[tuple[type, str], Mapping[str, Any]]


def json_schema(kind: type, title: str, overrides: Override | None = None) -> dict[str, Any]:
    """Return the schema of a dataclass; `overrides` replace those of single fields."""
    definitions: dict[str, Any] = {}
    top = _Writer(definitions, overrides or {}).dataclass(kind)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": title,
        **top,
        "definitions": dict(sorted(definitions.items())),
    }


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Collects the definitions of dataclasses on the way."""

    definitions: dict[str, Any]
    overrides: Override

    def dataclass(self, kind: type) -> dict[str, Any]:
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(typing.cast(Any, kind))
        read = [field for field in fields if field.init]
        required = [
            field.name
            for field in read
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        properties: dict[str, Any] = {
            field.name: self._field(kind, field, hints[field.name]) for field in read
        }
        derived: dict[str, Any] = {field.name: {} for field in fields if not field.init}
        schema: dict[str, Any] = {
            "type": "object",
            "properties": properties | derived,
            "additionalProperties": False,
        }
        return schema | ({"required": required} if required else {})

    def _field(self, kind: type, field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
        override = self.overrides.get((kind, field.name))
        if override is not None:
            return dict(override)
        schema = self.value(hint)
        limits = range_of(field)
        return schema if limits is None else {**schema, "minimum": limits[0], "maximum": limits[1]}

    def value(self, kind: Any) -> dict[str, Any]:
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if kind is object or kind is Any:
            return {}
        if kind is type(None):
            return {"type": "null"}
        if kind in _SCALARS:
            return {"type": _SCALARS[kind]}
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self.value(each) for each in inner]}
        if origin is typing.Literal:
            return {"enum": list(inner)}
        if origin is tuple and len(inner) == 2 and inner[1] is ...:
            return {"type": "array", "items": self.value(inner[0])}
        if origin is frozenset:
            return {"type": "array", "items": self.value(inner[0])}
        if origin is collections.abc.Mapping:
            return {"type": "object", "additionalProperties": self.value(inner[1])}
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return {"enum": [member.value for member in kind]}
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            if kind.__name__ not in self.definitions:
                self.definitions[kind.__name__] = {}
                self.definitions[kind.__name__] = self.dataclass(kind)
            return {"$ref": f"#/definitions/{kind.__name__}"}
        raise TypeError(f"{kind} given, which has no schema")


def profile_schema() -> dict[str, Any]:
    """Return the schema (draft-07) of what `save_profile` writes."""
    knobs = {
        "type": "object",
        "properties": {name: _knob(knob) for name, knob in KNOBS.items()},
        "additionalProperties": False,
    }
    return json_schema(Profile, "autoprec profile", {(Recipe, "knobs"): knobs})


def _knob(knob: Knob) -> dict[str, Any]:
    if knob.values:
        return {"enum": list(knob.values), "description": knob.meaning}
    return {
        "type": "integer",
        "minimum": knob.low,
        "maximum": knob.high,
        "description": knob.meaning,
    }
