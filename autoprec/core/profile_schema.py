"""The JSON Schema of a profile file."""

from __future__ import annotations

from typing import Any

from autoprec.core.json_schema import json_schema
from autoprec.core.profile import Profile
from autoprec.core.recipe import KNOBS, Knob, Recipe


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
