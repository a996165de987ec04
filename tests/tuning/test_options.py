"""The settings of a tuning: one list of names, types and defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from autoprec.api import tune
from autoprec.core.dtypes import Policy
from autoprec.errors import UsageError
from autoprec.tuning.options import Options, Settings, options_from

#: Arguments of `tune` that are no settings.
OTHERS = {"task", "device", "options", "listener"}


def test_the_settings_of_tune_are_the_fields_of_options_with_their_defaults() -> None:
    parameters = inspect.signature(tune).parameters
    settings = {name: each.default for name, each in parameters.items() if name not in OTHERS}
    defaults = {field.name: getattr(Options(), field.name) for field in dataclasses.fields(Options)}
    assert settings == defaults
    assert list(settings) == list(defaults)
    assert list(get_type_hints(Settings)) == list(defaults)


def test_a_default_is_the_option_itself() -> None:
    parameters = inspect.signature(tune).parameters
    settings = {name: each.default for name, each in parameters.items() if name not in OTHERS}
    assert options_from(None, Settings(**settings)) == Options()  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"policies": "float32,bf16"}, {"policies": (Policy.FLOAT32, Policy.MIXED_BFLOAT16)}),
        ({"policies": [Policy.FLOAT32]}, {"policies": (Policy.FLOAT32,)}),
        ({"batch_sizes": "16-64"}, {"batch_sizes": (16, 32, 64)}),
        ({"batch_sizes": [64, 16]}, {"batch_sizes": (16, 64)}),
        ({"output": "a.yaml"}, {"output": Path("a.yaml")}),
        ({"float32_modules": "head"}, {"float32_modules": ("head",)}),
        ({"float32_modules": ["head", "norm"]}, {"float32_modules": ("head", "norm")}),
    ],
)
def test_settings_are_read_as_a_caller_writes_them(
    settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert options_from(None, Settings(**settings)) == Options(**expected)  # type: ignore[typeddict-item]


def test_options_and_single_settings_exclude_each_other() -> None:
    options = Options(trials=3)
    assert options_from(options, Settings(trials=None)) is options
    with pytest.raises(UsageError, match="options or single settings, not both"):
        options_from(options, Settings(seed=1))
    with pytest.raises(UsageError, match="unexpected keyword argument 'trial'"):
        options_from(None, {"trial": 3})  # type: ignore[typeddict-unknown-key]


def test_a_study_of_ranks_is_another_than_that_of_one_process_or_another_engine() -> None:
    identities = {
        repr(Options(nproc=nproc, engine=engine).identity())
        for nproc, engine in ((1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp2"))
    }
    assert len(identities) == 4
    assert len(Options().identity()) == 9  # studies from before there were ranks are still found


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nproc": 0}, "`nproc` 0 given, expected a number above 0"),
        ({"nproc": 2, "engine": "zero3"}, "`engine` 'zero3' given, expected one of ddp, fsdp2"),
        ({"engine": "fsdp2"}, "`engine=fsdp2` given, which shares a step among ranks"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        Options(**settings)
