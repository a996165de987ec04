"""Every code block of README and docs/ runs in a test; here the shell's, and that none is missed.

The commands that tune run on the simulated model. Those that need several devices or nodes run in
`make test-scale`, and the one that installs is in test_packaging.py.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import SIMULATED_TASK
from core.example_profile import PROFILE
from markdown_it import MarkdownIt

from autoprec.cli import main
from autoprec.core.codec import from_plain, to_plain
from autoprec.core.number_words import percent
from autoprec.core.profile import Profile
from autoprec.core.recipe_words import describe_recipe
from tests.code_blocks import PAGES, ROOT, block, blocks_of, commands_in

#: Products are timed in tests/backends/shared/test_matmul_timing.py.
pytestmark = pytest.mark.usefixtures("unmeasured", "in_process")

TASK = SIMULATED_TASK.format(
    arguments="""per_sample={"float32": 0.0005, "mixed_bfloat16": 0.0002}"""
)


def test_every_block_is_asked_for_by_a_test() -> None:
    asked = set()
    for file in (ROOT / "tests").rglob("*.py"):
        for page, number in re.findall(r'block\("([^"]+)", (\d+)\)', file.read_text("utf-8")):
            asked.add((page, int(number)))
    assert asked == {(page, n) for page in PAGES for n in range(len(blocks_of(page)))}


def test_a_framework_is_added_as_the_one_of_the_tests_is() -> None:
    written = tomllib.loads(block("docs/reference.md", 0))
    (group, named), *others = written["project"]["entry-points"].items()
    installed = configparser.ConfigParser()
    installed.read(ROOT / "tests" / "frameworks" / "toy-1.0.dist-info" / "entry_points.txt")
    assert others == []
    assert installed.sections() == [group]
    assert [*installed[group]] == [*named]


def test_no_block_is_indented_for_those_would_not_be_found() -> None:
    for page in PAGES:
        tokens = MarkdownIt().parse((ROOT / page).read_text("utf-8"))
        assert [each.content for each in tokens if each.type == "code_block"] == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a task, which is the current one; the script there is one, too."""
    for name in ("model.py", "train.py"):
        (tmp_path / name).write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    assert program == "autoprec"
    assert main(words) == 0, command


def test_the_first_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for console in (block("README.md", 1), block("docs/index.md", 0)):
        commands = commands_in(console)
        assert {command.split()[1] for command in commands} == {"probe", "tune"}
        for command in commands:
            run(command)
    assert (folder / "model.profile.yaml").is_file()
    assert (folder / "train.profile.yaml").is_file()
    assert (folder / "model.report.html").is_file()
    _, *later = commands_in(block("README.md", 4))
    assert [command.split()[1] for command in later] == ["check", "verify"]
    for command in later:
        run(command)


def test_the_profile_of_the_readme_is_one_and_the_line_above_it_says_the_same() -> None:
    """The line is one that the first hour shows, whole; the profile is shortened."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (shown,) = re.findall(r"```text\n(result: .*?)```", readme, re.S)
    line = " ".join(shown.split())
    assert line in " ".join((ROOT / "docs/first-hour.md").read_text("utf-8").split())
    excerpt = yaml.safe_load(block("README.md", 3))
    profile = from_plain(Profile, merged(to_plain(PROFILE), excerpt))
    gain = profile.evidence.speedup
    assert f"{describe_recipe(profile.recipe)}: {gain.in_words()} over" in line
    assert f"loss within {percent(profile.evidence.parity.loss_deviation)} at" in line


def merged(whole: Any, part: Any) -> Any:
    """A mapping with the values of another one in their places."""
    if not (isinstance(whole, dict) and isinstance(part, dict)):
        return part
    return {**whole, **{key: merged(whole.get(key), value) for key, value in part.items()}}


def test_what_the_readme_says_for_each_trainer_is_code_of_its_page() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    use = readme[readme.index("## Use") : readme.index("## What you get")]
    said = dict(re.findall(r"^- \*\*(.+?)\*\*: (.*)$", use, re.M))
    pages = ("docs/apply-keras.md", *(page for page in PAGES if "docs/trainers" in page))
    code = "\n".join(text for page in pages for _, text in blocks_of(page))
    assert list(said) == [
        "Keras",
        "Lightning",
        "accelerate",
        "Hugging Face's Trainer",
        "DDP, FSDP2",
        "Off",
    ]
    for name in list(said)[:-1]:
        quoted = [each for each in re.findall(r"`([^`]+)`", said[name]) if "=" in each]
        assert quoted, name
        assert [each for each in quoted if each not in code] == []


def test_the_commands_of_the_first_hour(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that it tunes is of PyTorch; tests/test_examples_torch.py trains the real one."""
    (probe,) = commands_in(block("docs/first-hour.md", 0))
    run(probe)
    assert "mixed_bfloat16" in capsys.readouterr().out
    (tune,) = commands_in(block("docs/first-hour.md", 1))
    task = folder / tune.split()[-1]
    task.parent.mkdir(parents=True)
    task.write_text(TASK)
    run(tune)
    assert task.with_suffix(".profile.yaml").is_file()


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
