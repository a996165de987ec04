"""Every code block of README and docs/ runs in a test; here the shell's, and that none is missed.

The commands that tune run on the simulated model. Those that need several devices or nodes run in
`make test-scale`, and the one that installs is in test_packaging.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import SIMULATED_TASK
from markdown_it import MarkdownIt

from autoprec.cli import main
from tests.code_blocks import PAGES, ROOT, block, blocks_of, commands_in

TASK = SIMULATED_TASK.format(
    arguments="""per_sample={"float32": 0.0005, "mixed_bfloat16": 0.0002}"""
)


def test_every_block_is_asked_for_by_a_test() -> None:
    asked = set()
    for file in (ROOT / "tests").rglob("*.py"):
        for page, number in re.findall(r'block\("([^"]+)", (\d+)\)', file.read_text("utf-8")):
            asked.add((page, int(number)))
    assert asked == {(page, n) for page in PAGES for n in range(len(blocks_of(page)))}


def test_no_block_is_indented_for_those_would_not_be_found() -> None:
    for page in PAGES:
        tokens = MarkdownIt().parse((ROOT / page).read_text("utf-8"))
        assert [each.content for each in tokens if each.type == "code_block"] == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a task; the lock of its tunings is this test's alone."""
    locks = tmp_path / "locks"
    locks.mkdir()
    monkeypatch.setenv("TMPDIR", str(locks))
    monkeypatch.setattr("tempfile.tempdir", str(locks))
    (tmp_path / "model.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    assert program == "autoprec"
    assert main(words) == 0, command


@pytest.mark.slow
def test_the_first_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for console in (block("README.md", 0), block("docs/index.md", 0)):
        commands = commands_in(console)
        assert [command.split()[1] for command in commands] == ["probe", "tune"]
        for command in commands:
            run(command)
    assert (folder / "model.profile.yaml").is_file()
    assert (folder / "model.report.html").is_file()


@pytest.mark.slow
def test_the_commands_of_the_first_hour(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that it tunes is of PyTorch; tests/test_examples_torch.py trains the real one."""
    (probe,) = commands_in(block("docs/first-hour.md", 0))
    run(probe)
    assert "mixed_bfloat16" in capsys.readouterr().out  # a busy machine may leave it unmeasured
    (tune,) = commands_in(block("docs/first-hour.md", 1))
    task = folder / tune.split()[-1]
    task.parent.mkdir(parents=True)
    task.write_text(TASK)
    run(tune)
    assert task.with_suffix(".profile.yaml").is_file()


@pytest.mark.slow
def test_verify_prints_what_its_page_shows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (command, *_), shown = commands_in(block("docs/verify.md", 0)), block("docs/verify.md", 0)
    policies = "--policies float32,mixed_bfloat16"  # whatever this processor is good at
    run(f"autoprec tune model.py {policies} -o digits_conv.profile.yaml")
    capsys.readouterr()
    run(command)
    printed = "".join(capsys.readouterr())
    for line in shown.splitlines()[1:]:
        stated = re.sub(r"(: holds: ).*", r"\1", line)
        assert stated in printed, line


@pytest.mark.slow
def test_the_workflow_installs_and_verifies(folder: Path) -> None:
    """Its steps run where everything is installed, and pip asks no package index."""
    run("autoprec tune model.py --policies float32,mixed_bfloat16")
    (folder / "requirements.txt").write_text("pyyaml\n")
    workflow = yaml.safe_load(block("docs/verify.md", 1))
    steps = workflow["jobs"]["verify"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert [command.split()[0] for command in commands] == ["pip", "autoprec"]
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    for command in commands:
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            env={**os.environ, "PATH": programs, "PIP_NO_INDEX": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "does not provide the extra" not in done.stderr
    uploaded = next(step["with"]["path"] for step in steps if "upload" in step.get("uses", ""))
    claims = json.loads((folder / uploaded).read_text())
    assert claims
