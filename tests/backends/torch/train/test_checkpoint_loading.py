"""A model begins with the weights of a checkpoint, in whichever form training loops save it."""

from __future__ import annotations

import os
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.train.checkpoint_loading import load_weights
from autoprec.backends.torch.train.task_runner import build_model
from autoprec.errors import TaskError

pytestmark = pytest.mark.torch


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@pytest.fixture
def trained() -> nn.Sequential:
    torch.manual_seed(7)
    model = net()
    model(torch.randn(16, 4))  # the running statistics are state, too
    return model


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in state.items()}


def same(model: nn.Module, trained: nn.Module) -> bool:
    ours, theirs = model.state_dict(), trained.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)


FORMS = {
    "a state dict": lambda state: state,
    "under model_state_dict, as the tutorials save it": lambda state: {
        "epoch": 3,
        "model_state_dict": state,
        "optimizer_state_dict": {"state": {}, "param_groups": [{"lr": 0.1}]},
        "loss": torch.tensor(0.5),
    },
    "of a DDP model": lambda state: {"model": prefixed(state, "module.")},
    "of a compiled DDP model": lambda state: prefixed(state, "module._orig_mod."),
    "of Lightning": lambda state: {"state_dict": OrderedDict(prefixed(state, "model."))},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_a_state_dict_is_loaded(trained, tmp_path, form):
    file = tmp_path / "last.pt"
    torch.save(form(trained.state_dict()), file)
    model = net()
    assert not same(model, trained)
    load_weights(model, file)
    assert same(model, trained)


def test_safetensors_are_loaded(trained, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(trained.state_dict(), file)
    model = net()
    load_weights(model, file)
    assert same(model, trained)


def test_safetensors_without_their_package_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(TaskError, match="pip install safetensors"):
        load_weights(net(), tmp_path / "model.safetensors")


def test_a_task_with_a_checkpoint_builds_trained_models_whatever_the_seed(trained, tmp_path):
    file = tmp_path / "last.pt"
    torch.save(trained.state_dict(), file)
    task = Task("t.py", net, lambda n: [], checkpoint=file)
    assert all(same(build_model(task, "cpu", seed), trained) for seed in (0, 1))


def test_lazy_layers_get_their_shapes_from_the_file(tmp_path):
    made = nn.Sequential(nn.LazyLinear(2))
    made(torch.zeros(1, 5))
    torch.save(made.state_dict(), tmp_path / "last.pt")
    model = nn.Sequential(nn.LazyLinear(2))
    load_weights(model, tmp_path / "last.pt")
    assert same(model, made)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "2.bias"}, "1 weight missing in the file"),
        (lambda s: s | {"3.bias": torch.zeros(1)}, "1 weight unknown to the model, such as 3.bias"),
        (lambda s: s | {"0.weight": torch.zeros(3, 9)}, r"size mismatch for 0\.weight"),
        (
            lambda s: {"optimizer": {}, "epoch": 3},
            "holds no state dict .found 'optimizer', 'epoch'",
        ),
        (lambda s: [1, 2], "holds no state dict .found list"),
    ],
)
def test_what_does_not_fit_is_told_and_the_file_named(trained, tmp_path, change, told):
    file = tmp_path / "last.pt"
    torch.save(change(dict(trained.state_dict())), file)
    with pytest.raises(TaskError, match=rf"last\.pt .*{told}"):
        load_weights(net(), file)


class Planted:
    def __reduce__(self) -> Any:
        return os.mkdir, ("planted",)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: Path(path).write_bytes(value)])
def test_nothing_in_a_file_is_run(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "last.pt"
    save(Planted() if save is torch.save else pickle.dumps(Planted(), protocol=2), file)
    with pytest.raises(TaskError, match=r"last\.pt cannot be read as weights alone"):
        load_weights(net(), file)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("name", ["last.pt", "last.safetensors"])
def test_a_damaged_file_is_an_error_with_its_name(name, trained, tmp_path):
    file = tmp_path / name
    (save_file if name.endswith("s") else torch.save)(trained.state_dict(), file)
    file.write_bytes(file.read_bytes()[:-100] if name.endswith(".pt") else b"{" * 40)
    with pytest.raises(TaskError, match=f"{name} cannot be read"):
        load_weights(net(), file)
