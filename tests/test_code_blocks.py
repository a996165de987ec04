"""Every code block of README and docs/ runs in a test; here the shell's, and that none is missed.

The commands that tune run on the simulated model. Those that need several devices or nodes are only
read by the command line's parser: tests of `make test-scale` run the like.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import SIMULATED_TASK

from autoprec.cli import build_parser, main
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    assert program == "autoprec"
    assert main(words) == 0, command


def is_understood(command: str) -> None:
    """Parse a command of ours, or what torchrun starts; of pip, check the extras."""
    words = shlex.split(command, comments=True)
    while re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        del words[0]
    if words[0] == "pip":
        extras = re.findall(r"\[(.*?)\]", words[-1])[0].split(",")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(extras) <= project["optional-dependencies"].keys()
        return
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    assert words[0] == "autoprec", command
    build_parser().parse_args(words[1:])


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


@pytest.mark.parametrize(
    "console",
    [
        pytest.param(block("README.md", 2), id="installing"),
        pytest.param(block("docs/scale.md", 0), id="several ranks"),
        pytest.param(block("docs/scale.md", 4), id="a cluster"),
        pytest.param(block("docs/scale.md", 5), id="SLURM"),
    ],
)
def test_commands_that_are_not_run_are_understood(console: str) -> None:
    commands = commands_in(console)
    assert commands
    for command in commands:
        is_understood(command)


def test_the_loop_over_clouds_is_shell_and_its_commands_are_understood() -> None:
    script = "\n".join(commands_in(block("docs/scale.md", 7)))
    subprocess.run(["bash", "-n", "-c", script], check=True)
    ours = re.findall(r"autoprec (?:tune|fleet) [^\"\n]*", script)
    assert len(ours) == 2
    for command in ours:
        is_understood(command)


def test_the_kubernetes_job_tunes_with_arguments_that_are_understood() -> None:
    job = yaml.safe_load(block("docs/scale.md", 6))
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    is_understood(shlex.join([*container["command"], *container["args"]]))
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


def test_the_workflow_runs_commands_that_are_understood() -> None:
    workflow = yaml.safe_load(block("docs/verify.md", 1))
    steps = workflow["jobs"]["verify"]["steps"]
    commands = [step["run"].partition(">")[0] for step in steps if "run" in step]
    assert [command.split()[0] for command in commands] == ["pip", "autoprec"]
    is_understood(commands[1])
