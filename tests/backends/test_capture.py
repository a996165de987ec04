"""What a function returned is told by the modules of its types; others are refused."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest

from autoprec.backends.capture import check_objects, is_factory
from autoprec.errors import UsageError


def of(module: str, name: str) -> Any:
    return type(name, (), {"__module__": module})()


MODEL, KERAS = of("torch.nn.modules.module", "Module"), of("keras.src.models.model", "Model")
LIGHTNING, OLD = of("lightning.pytorch.trainer", "Trainer"), of("pytorch_lightning.x", "Trainer")
TRAINER = type("SFTTrainer", (type(of("transformers.trainer", "Trainer")),), {})()

KNOWN = [
    (MODEL, 1, 2, 3),
    {"model": MODEL, "optimizer": 1, "loader": 2, "step": 3},
    {"model": MODEL, "optimizer": 1, "loader": 2, "step": 3, "clip_grad_norm": 1.0},
    (LIGHTNING, MODEL),
    (OLD, MODEL, []),
    TRAINER,
    (KERAS, 1),
    (KERAS, 1, 2),
]

UNKNOWN = [
    (None, "None given, expected (model, optimizer, loader, step)"),
    (MODEL, "a torch.nn.modules.module.Module given"),
    ((MODEL, 1), "a tuple of (Module, int) given"),
    ((LIGHTNING,), "a tuple of (Trainer) given"),
    ((), "a tuple of () given"),
    ({"model": MODEL}, "without optimizer, loader, step given"),
    (
        {"model": MODEL, "optimizer": 1, "loader": 2, "step": 3, "loss": 4},
        "with loss, which is not read given",
    ),
    ({"model": 1, "optimizer": 1, "loader": 2, "step": 3}, "the model is a builtins.int"),
]


@pytest.mark.parametrize("objects", KNOWN, ids=range(len(KNOWN)))
def test_known_objects_are_taken(objects: Any) -> None:
    check_objects(objects, name="build")


@pytest.mark.parametrize(("objects", "message"), UNKNOWN, ids=[message for _, message in UNKNOWN])
def test_others_are_refused(objects: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_objects(objects, name="train.py:build")
    assert str(caught.value).startswith("train.py:build: ")
    assert message in str(caught.value)


def test_functions_are_told_from_objects() -> None:
    assert is_factory(of)
    assert is_factory(functools.partial(of, "a"))
    assert not is_factory(MODEL)


def test_no_framework_is_imported_to_find_out() -> None:
    code = (
        "import sys; from autoprec.backends.capture import check_objects\n"
        "Net = type('Net', (), {'__module__': 'torch.nn.modules.module'})\n"
        "check_objects((Net(), 1, 2, 3), name='x')\n"
        "assert not {'torch', 'keras', 'lightning', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
