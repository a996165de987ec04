"""A script runs up to its own training and no further, and what fails on the way is told.

The trainer here is a package that only looks like Lightning, beside the script.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.errors import AutoprecError, TaskError, UserCodeError
from autoprec.workers import training_calls
from autoprec.workers.parked_script import ReachedCall, run_script
from autoprec.workers.task_source import TaskSource
from autoprec.workers.training_calls import CALLS, TRAINERS

TRAINER = """
class Trainer:
    def fit(self, model, train_dataloaders=None, val_dataloaders=None, datamodule=None):
        self.step()

    def step(self):
        import torch.optim.optimizer as optimizer
        for hook in optimizer.HOOKS:
            hook(None, (), {})
        print("updated")
"""

OPTIMIZER = """
from types import SimpleNamespace
HOOKS = []

def register_optimizer_step_pre_hook(hook):
    HOOKS.append(hook)
    return SimpleNamespace(remove=lambda: HOOKS.remove(hook))
"""

CAPTURE = """
def from_lightning(*given, name):
    return (name, *given)
"""

FITS = """
import sys
from pathlib import Path
from lightning.pytorch.trainer.trainer import Trainer

class Own(Trainer):
    def fit(self, *given):
        return super().fit(*given)

print("preamble", __name__, sys.argv[1:], __file__ == sys.argv[0])
try:
    Own().fit("model", "loader")
except Exception:
    pass
print("after")
Path(__file__).with_name("written").touch()
"""


class Parked(KeyboardInterrupt):
    """Where the worker would serve, and end."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a trainer and an optimizer; forget afterwards what was imported."""
    installed = tmp_path / "site-packages"
    for name, text in (
        ("lightning/pytorch/trainer/trainer", TRAINER),
        ("torch/optim/optimizer", OPTIMIZER),
        ("fake_capture", CAPTURE),
    ):
        file = installed / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for each in file.relative_to(installed).parents[:-1]:
            (installed / each / "__init__.py").touch()
    calls = tuple(replace(each, capture="fake_capture") for each in CALLS)
    monkeypatch.setattr(training_calls, "CALLS", calls)
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("lightning", "torch", "fake_capture", "beside"):
            del sys.modules[name]


Run = Callable[..., Any]


@pytest.fixture
def run(folder: Path) -> Run:
    """Run a script; return what it was answered where it was parked, an exception included."""

    def run(text: str, **fields: Any) -> Any:
        path = folder / "train.py"
        path.write_text(textwrap.dedent(text))
        answers: list[Any] = []

        def serve_here(work: Callable[[], Any]) -> Any:
            try:
                answers.append(work())
            except AutoprecError as error:
                answers.append(error)
            raise Parked

        with pytest.raises(Parked):
            run_script(TaskSource(path, script=True, **fields), serve_here, lambda call: call)
        return answers[0]

    return run


def test_it_waits_at_its_own_call_and_nothing_runs_after(
    run: Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call: ReachedCall = run(FITS, arguments=("--lr", "1e-3"))
    line = 1 + FITS[: FITS.index("super().fit")].count("\n")
    assert call.said == f"train.py:{line} Trainer.fit (Lightning)"
    name, trainer, *given = call.task()
    assert (name, type(trainer).__name__, given) == ("train.py", "Own", ["model", "loader", None])
    assert call.made_by.startswith("lightning")
    assert capsys.readouterr().out == "preamble __main__ ['--lr', '1e-3'] True\n"
    assert not (folder / "written").exists()


def test_calls_before_the_one_that_was_asked_for_run(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    call = run(FITS + "Own().fit('second')\n", at=2)
    assert call.task()[2:] == ("second", None, None)
    assert capsys.readouterr().out.splitlines()[1:] == ["updated", "after"]


def test_an_update_outside_a_trainer_ends_it_there(run: Run, folder: Path) -> None:
    """Of a loop of the script's own nothing can be captured, and nothing must be overwritten."""
    error = run(
        """
        from pathlib import Path
        from lightning.pytorch.trainer.trainer import Trainer
        kept = Path(__file__).with_name("kept")
        kept.touch()
        for step in range(10):
            try:
                Trainer().step()
            except Exception:
                pass
        kept.unlink()
        """
    )
    assert isinstance(error, TaskError)
    assert "train.py:8 makes an update in a loop of the script's own" in str(error)
    assert "`autoprec tune train.py:build`" in str(error)
    assert (folder / "kept").exists()


def test_what_is_wrong_with_a_call_is_said_by_the_call(run: Run, folder: Path) -> None:
    with pytest.raises(UserCodeError, match="missing 1 required positional argument"):
        run("from lightning.pytorch.trainer.trainer import Trainer\nTrainer().fit()")


def test_modules_keep_their_own_loaders(run: Run) -> None:
    run(FITS)
    module = sys.modules["lightning.pytorch.trainer.trainer"]
    assert "Patching" not in type(module.__loader__).__name__
    assert module.Trainer.fit.__wrapped__.__name__ == "fit"


ENDINGS = {
    "the end": (
        "print(1)",
        TaskError,
        f"ended without a call of fit or train of {TRAINERS} (none)",
    ),
    "a good exit": ("import sys; sys.exit(0)", TaskError, "`autoprec tune train.py:build`"),
    "an exit": ("import sys; sys.exit(2)", TaskError, "called sys.exit(2) before it trained"),
    "wrong arguments": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--x'])",
        TaskError,
        "Its arguments were none; they follow a `--`, as in `autoprec tune train.py -- --lr 1e-3`",
    ),
    "an error": ("1 / 0", UserCodeError, "train.py raised ZeroDivisionError before it trained"),
    "a question": ("input()", UserCodeError, "A script that is tuned has no input"),
    "too much memory": ("raise MemoryError", UserCodeError, "itself needs more memory than"),
    "no Python in another file": ("import beside", UserCodeError, "raised SyntaxError"),
}


@pytest.mark.parametrize(("text", "kind", "said"), ENDINGS.values(), ids=ENDINGS)
def test_a_script_that_ends_before_it_trains_is_told(
    run: Run, folder: Path, text: str, kind: type[AutoprecError], said: str, monkeypatch: Any
) -> None:
    def no_input(*_: object) -> str:
        raise EOFError("EOF when reading a line")

    monkeypatch.setattr("builtins.input", no_input)
    (folder / "beside.py").write_text("def f(:")
    with pytest.raises(kind, match=re.escape(said)) as raised:
        run(text)
    if isinstance(raised.value, UserCodeError):
        assert "train.py" in raised.value.frames
        assert not re.search(r"autoprec/(workers|backends)|runpy", raised.value.frames)


def test_calls_that_are_too_few_are_counted(run: Run) -> None:
    with pytest.raises(TaskError, match=r"without 3 calls of fit or train .*\(only 1 of them\)"):
        run(FITS, at=3)


def test_a_capture_is_given_what_the_call_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name what is named, and only if it was given: its default is that of the trainer."""
    capture = SimpleNamespace(from_keras=lambda *given, **named: (given, named))
    monkeypatch.setitem(sys.modules, "capturing", capture)
    keras = replace(next(each for each in CALLS if each.trainer == "Keras"), capture="capturing")
    given = {"self": "model", "x": 1, "epochs": 3, "class_weight": {0: 2.0}, "shuffle": False}
    assert keras.task_of(given, "train.py") == (
        ("model", 1, None, None, None),
        {"class_weight": {0: 2.0}, "shuffle": False, "name": "train.py"},
    )
