"""A function of a file is tuned as the page says, and a function of a notebook in a notebook."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.backends.capture import task_of
from autoprec.cli import main
from autoprec.errors import UserCodeError
from autoprec.profiles import load_profile
from autoprec.workers.factory import load_source
from autoprec.workers.task_source import TaskSource
from tests.backends.torch.capture.captured import first_loss
from tests.code_blocks import ROOT, block, commands_in
from tests.processes import undisturbed

SHORT = ("--trials", "2", "--rounds", "1", "--proof-steps", "30", "--no-extras", "--device", "cpu")


def test_the_function_of_the_page_returns_a_task() -> None:
    names: dict[str, Any] = {}
    exec(block("docs/tune-what-exists.md", 0), names)
    torch.manual_seed(0)
    task = task_of(names["build"](), name="train.py:build")
    assert task.batch_size == 64
    assert [first_loss(task, size) for size in (8, 64)] == pytest.approx([2.3, 2.3], abs=0.5)


LOOP = """
    model, optimizer, loader, step = build()
    try:
        for batch in loader:
            step(model, batch).backward()
            optimizer.step()
    except Exception:
        pass
"""


@pytest.mark.parametrize(
    ("begins", "message"),
    [
        ("if True:", "unguarded.py raised Trains while it was imported: it trains there"),
        ("def main():", "unguarded.py:main was called, and it trains there"),
    ],
)
def test_a_file_or_a_function_that_trains_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str, message: str
) -> None:
    path = tmp_path / "unguarded.py"
    path.write_text(f"{block('docs/tune-what-exists.md', 0)}\n{begins}{LOOP}")
    for name in ("path", "meta_path", "argv"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    with pytest.raises(UserCodeError) as caught:
        load_source(TaskSource(path, "main"))
    del sys.modules["unguarded"]
    assert message in str(caught.value)
    assert "Put what trains under `if __name__ == '__main__':`" in str(caught.value)
    assert "optimizer.step()" in caught.value.frames


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_the_command_of_the_page_tunes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(block("docs/tune-what-exists.md", 0))
    monkeypatch.chdir(tmp_path)
    (command,) = commands_in(block("docs/tune-what-exists.md", 1))
    program, *words = shlex.split(command)
    assert (program, main([*words, *SHORT])) == ("autoprec", 0)
    profile = load_profile(tmp_path / "train.profile.yaml")
    assert profile.recipe.effective_batch == 64
    assert profile.task.framework == "torch"


@pytest.mark.slow
def test_the_notebook_shows_progress_the_profile_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its search and proof are cut short."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    text = (ROOT / "examples/torch/notebook.ipynb").read_text(encoding="utf-8")
    settings = "trials=2, rounds=1, proof_steps=30, extras=False, device='cpu'"
    shortened = text.replace("autoprec.tune(digits)", f"autoprec.tune(digits, {settings})")
    notebook = nbformat.reads(shortened, as_version=4)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    for name, value in undisturbed().items():
        monkeypatch.setenv(name, value)
    nbclient.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = {
        cell.source.partition("\n")[0]: cell.outputs for cell in notebook.cells if "outputs" in cell
    }
    progress = shown[f"profile = autoprec.tune(digits, {settings})"]
    assert any("<pre" in each.data.get("text/html", "") for each in progress if "data" in each)
    assert "<caption>digits</caption>" in shown["profile"][0].data["text/html"]
    assert "&lt;svg" in shown["autoprec.report(profile)"][0].data["text/html"]
    printed = "".join(each.text for each in shown["model, optimizer, loader, _ = digits()"])
    assert printed.count("epoch") == 3
    assert load_profile(tmp_path / "digits.profile.yaml").recipe.effective_batch == 64
    assert [path.name for path in tmp_path.iterdir()] == ["digits.profile.yaml"]
