"""The schema of profiles: what is written fits it, and what it refuses the loader refuses."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.profile.schema import profile_schema
from autoprec.core.recipe import Distributed
from autoprec.errors import ProfileError
from autoprec.profiles import parse_profile, to_mapping
from tests.fuzz.example import FULL, PLAIN_FLOAT32

SCHEMA = profile_schema()
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
RANKS = replace(
    PLAIN_FLOAT32,
    recipe=replace(PLAIN_FLOAT32.recipe, distributed=Distributed("ddp", 2)),
)
PROFILES = {"full": FULL, "float32": PLAIN_FLOAT32, "ranks": RANKS}


def plain(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(to_mapping(PROFILES[name])))
    return document


def test_it_is_a_schema_of_draft_07() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert SCHEMA["required"] == [
        *("schema", "created", "autoprec", "task", "device", "software", "recipe", "evidence")
    ]


@pytest.mark.parametrize("name", PROFILES)
def test_what_is_written_fits(name: str) -> None:
    assert list(VALIDATOR.iter_errors(plain(name))) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 4),
        (("schema",), True),
        (("recipe", "policy"), "bf16"),
        (("recipe", "batch_size"), 0),
        (("recipe", "batch_size"), "32"),
        (("recipe", "knobs"), {"treads": 4}),
        (("recipe", "knobs"), {"threads": 0}),
        (("recipe", "knobs"), {"fused_optimizer": 1}),
        (("recipe", "loss_scale", "mode"), "often"),
        (("recipe", "float32_modules"), [1]),
        (("recipe", "colour"), "red"),
        (("evidence", "speedup", "ratio"), -1.0),
        (("evidence", "parity", "verdict"), "fine"),
        (("evidence", "loss_scale", "smallest_gradient"), "many"),
        (("evidence", "islands"), {"tried": ["head"]}),
        (("evidence", "padding"), [{"module": "head", "size": 10}]),
        (("evidence", "tried"), [{"policy": "float32"}]),
        (("evidence", "parity", "curves", "float32"), ["low"]),
        (("device", "kind"), "abacus"),
        (("software",), {"torch": 2}),
        (("recipe", "distributed"), {"engine": "abacus", "world_size": 2}),
    ],
)
def test_what_is_wrong_is_refused_by_both(path: tuple[str, ...], value: object) -> None:
    document = plain("full")
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert list(VALIDATOR.iter_errors(document))
    with pytest.raises(ProfileError):
        parse_profile(document, "p.yaml")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += places(item, (*path, index))
    return found


JUNK = st.sampled_from([None, True, -1, 10**40, "", "x", [], {}, [None], {"x": 1}])


@given(st.sampled_from(list(PROFILES)), st.data())
def test_whatever_is_changed_the_loader_refuses_what_the_schema_refuses(
    name: str, data: st.DataObject
) -> None:
    document = copy.deepcopy(plain(name))
    *outer, last = data.draw(st.sampled_from(places(document)))
    place: Any = document
    for key in outer:
        place = place[key]
    match data.draw(st.sampled_from(["change", "remove", "add"])):
        case "remove" if isinstance(place, dict):
            del place[last]
        case "add" if isinstance(place, dict):
            place[data.draw(st.sampled_from(["extra", "policy", "schema"]))] = data.draw(JUNK)
        case _:
            place[last] = data.draw(JUNK)
    if list(VALIDATOR.iter_errors(document)):
        with pytest.raises(ProfileError):
            parse_profile(document, "p.yaml")
