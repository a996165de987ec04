"""The settings of a tuning: what each is given as, kept as, and refused with."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoprec.api import plan, tune
from autoprec.core.dtypes import Policy
from autoprec.errors import UsageError
from autoprec.tuning.options import Arguments, Options
from autoprec.tuning.settings import settings_of

SETTINGS = [each.name for each in settings_of(Options)]


@pytest.mark.parametrize("function", [tune, plan])
def test_the_signature_has_every_setting_with_what_it_may_be_given_as(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [
        *("task", *SETTINGS),
        *("script", "at", "arguments", "device", "options", "listener"),
    ]
    assert [each.name for each in dataclasses.fields(Options)] == SETTINGS
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in SETTINGS)
    assert parameters["trials"].annotation == int | None
    assert parameters["batch_sizes"].annotation == str | Iterable[int] | None
    assert parameters["rounds"].default == Options().rounds == 6


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"policies": "float32,bf16"}, {"policies": (Policy.FLOAT32, Policy.MIXED_BFLOAT16)}),
        ({"policies": [Policy.FLOAT32, "fp32"]}, {"policies": (Policy.FLOAT32,)}),
        ({"policies": ""}, {"policies": ()}),
        ({"batch": "KNEE"}, {"batch": "knee", "asked_batches": None}),
        ({"batch": 256}, {"batch": "256", "fixed_batch": 256, "asked_batches": (256,)}),
        ({"batch": np.int64(7)}, {"batch": "7", "fixed_batch": 7}),
        ({"batch_sizes": "16-64"}, {"batch_sizes": (16, 32, 64)}),
        ({"batch_sizes": [64, 16, 16]}, {"batch_sizes": (16, 64)}),
        ({"batch_sizes": np.array([64, 16])}, {"batch_sizes": (16, 64)}),
        ({"trials": np.int64(3), "time_limit": np.float32(2)}, {"trials": 3, "time_limit": 2.0}),
        ({"time_limit": 60}, {"time_limit": 60.0}),
        ({"output": "a.yaml"}, {"output": Path("a.yaml")}),
        ({"storage": Path("a.journal")}, {"storage": "a.journal"}),
        ({"float32_modules": "head"}, {"float32_modules": ("head",)}),
        ({"float32_modules": ["head", "norm"]}, {"float32_modules": ("head", "norm")}),
        ({"knobs": "threads=2,1"}, {"knobs": {"threads": (2, 1)}}),
        (
            {"knobs": ["threads=2", "cudnn_benchmark=true", "compile_mode=default"]},
            {
                "knobs": {
                    "threads": (2,),
                    "cudnn_benchmark": (True,),
                    "compile_mode": ("default",),
                }
            },
        ),
        ({"knobs": {"threads": [2, 1]}}, {"knobs": {"threads": (2, 1)}}),
    ],
)
def test_settings_are_read_as_a_caller_writes_them(
    settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = Options(**settings)
    for name, value in expected.items():
        assert getattr(made, name) == value
        assert repr(getattr(made, name)) == repr(value)  # no class of a library is left
    assert dataclasses.replace(made) == made  # what was read once is read again as it is


def test_a_checkpoint_is_kept_as_the_place_of_a_file_that_can_be_read(tmp_path: Path) -> None:
    weights = tmp_path / "last.pt"
    weights.touch()
    assert Options(checkpoint=str(weights)).checkpoint == weights.resolve()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch": 0}, '`batch` 0 given, expected "knee", "max", "goodput" or a batch such as'),
        ({"batch": "kneee"}, "`batch` 'kneee' given, expected"),
        ({"batch": True}, "`batch` True given, expected"),
        ({"batch": 64, "batch_sizes": [64]}, "`batch=64` and `batch_sizes` given: give one or the"),
        ({"batch_sizes": 64}, "`batch_sizes` 64 given, expected a list such as [16, 64, 256]"),
        ({"batch_sizes": [0]}, "`batch_sizes` [0] given, expected a list such as [16, 64, 256]"),
        ({"batch_sizes": [1.5]}, "`batch_sizes` [1.5] given, expected a list such as [16, 64, 256"),
        ({"batch_sizes": "many"}, "`batch_sizes` 'many' given, expected a list such as"),
        ({"trials": "3"}, "`trials` '3' given, expected an integer above 0; give that, or leave"),
        ({"trials": 1.5}, "`trials` 1.5 given, expected an integer above 0"),
        ({"trials": True}, "`trials` True given, expected an integer above 0"),
        ({"time_limit": -1}, "`time_limit` -1 given, expected a number above 0"),
        ({"time_limit": float("nan")}, "`time_limit` nan given, expected a number above 0"),
        ({"search_limit": 0}, "`search_limit` 0 given, expected a number above 0"),
        ({"proof_seconds": "60"}, "`proof_seconds` '60' given, expected a number above 0"),
        ({"proof_steps": 4}, "`proof_steps` 4 given, expected 5 or more: fewer steps are no"),
        ({"nproc": 0}, "`nproc` 0 given, expected an integer above 0"),
        ({"seed": None}, "`seed` None given, expected an integer of 0 or more"),
        ({"seed": -1}, "`seed` -1 given, expected an integer of 0 or more"),
        ({"compile": "yes"}, "`compile` 'yes' given, expected True or False"),
        ({"output": 3}, "`output` 3 given, expected a path; give that, or leave `output` out"),
        ({"storage": 3}, "`storage` 3 given, expected text; give that, or leave `storage` out"),
        ({"policies": ["int8"]}, "unknown policy 'int8': expected one of float32, tf32, mixed_b"),
        ({"policies": 16}, '`policies` 16 given, expected names such as "bf16", "float32,bf16"'),
        (
            {"sampler": "gird"},
            "random, or the import path of a sampler of Optuna; did you mean 'gri",
        ),
        ({"sampler": 1}, "`sampler` 1 given, expected one of cost, tpe, grid, random, or the impo"),
        ({"knobs": {"speed": [1]}}, "unknown setting 'speed'"),
        ({"knobs": {"threads": 2}}, "`knobs` {'threads': 2} given, expected NAME=VALUE,VALUE"),
        ({"knobs": {"threads": []}}, "setting threads: '' given, expected an integer"),
        ({"knobs": "threads"}, "`knobs` 'threads' given, expected NAME=VALUE,VALUE such as"),
        ({"knobs": [3]}, "`knobs` '3' given, expected NAME=VALUE,VALUE such as"),
        ({"float32_modules": 3}, "`float32_modules` 3 given, expected a module's path"),
        ({"float32_modules": [3]}, "`float32_modules` [3] given, expected a module's path"),
        ({"trials": "x" * 99}, "x... given, expected an integer above 0"),
        ({"nproc": 2, "engine": "zero3"}, "`engine` 'zero3' given, expected one of ddp, fsdp2"),
        ({"engine": "fsdp2"}, "`engine=fsdp2` given, which shares a step among ranks"),
        ({"checkpoint": "/none.pt"}, "`checkpoint` /none.pt does not exist; expected a file"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_was_expected(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        Options(**settings)


@pytest.mark.parametrize("setting", settings_of(Arguments), ids=lambda each: each.name)
def test_every_setting_explains_its_default_and_says_what_it_expects(setting: Any) -> None:
    assert setting.read(setting.default) == getattr(Arguments("task.py"), setting.name)
    if setting.kept is not bool and setting.default not in (None, (), 1.0):
        assert f"(default: {setting.default}" in setting.explanation
    assert "{" not in setting.explanation
    with pytest.raises(UsageError, match=f"`{setting.name}` .* (expected|does not exist)"):
        setting.read(object() if setting.name != "checkpoint" else "/none")


def test_a_name_that_is_nearly_right_is_told_and_one_that_is_not_gets_them_all() -> None:
    with pytest.raises(UsageError, match="unknown setting 'trial'; did you mean 'trials'"):
        tune("task.py", trial=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"unknown setting 'qqq' \(known: output, nproc, .*device"):
        plan("task.py", qqq=3)  # type: ignore[call-arg]


def test_options_and_single_settings_exclude_each_other_and_both_are_named() -> None:
    said = re.escape("`options` and `trials`, `seed` given: give one or the other")
    with pytest.raises(UsageError, match=said):
        tune("task.py", options=Options(), trials=None, seed=1)
    with pytest.raises(UsageError, match="`options` of type dict given, expected Options of"):
        tune("task.py", options={"trials": 3})  # type: ignore[arg-type]
    given = Options(trials=3)
    assert Arguments("task.py", options=given).chosen is given
    assert Arguments("task.py", trials=3).chosen == given


@pytest.mark.parametrize("arguments", [(), ("task.py", "cuda")])
def test_the_task_is_given_and_nothing_else_without_its_name(arguments: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match=r"missing a required argument: 'task'|too many positional"):
        tune(*arguments)


def test_a_study_of_ranks_is_another_than_that_of_one_process_or_another_engine() -> None:
    identities = {
        repr(Options(nproc=nproc, engine=engine).identity())
        for nproc, engine in ((1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp2"))
    }
    assert len(identities) == 4


def test_a_setting_that_is_left_as_it_is_changes_no_study_and_no_limit() -> None:
    """So studies stay valid when a setting is added."""
    assert Options().identity() == Options().limits() == {}
    assert Options(
        policies="bf16", knobs="threads=2", trials=3, wait=True, rounds=2
    ).identity() == {
        "policies": (Policy.MIXED_BFLOAT16,),
        "knobs": {"threads": (2,)},
    }
    assert Options(seed=1, attribute=True, time_limit=9).limits() == {
        "time_limit": 9.0,
        "attribute": True,
    }
