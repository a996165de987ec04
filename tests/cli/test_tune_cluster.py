"""`autoprec tune` for clusters: what is refused before anything is connected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.commands import Run, Write, one_sentence


def test_without_ray_its_extra_is_named(
    write: Write, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, err = run(write(), "--ray")
    assert (code, out) == (2, "")
    assert "pip install 'autoprec[ray]'" in one_sentence(err)
    assert one_sentence(err).startswith("autoprec: --ray: ")


def test_without_srun_the_command_says_where_to_run_it(
    write: Write, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, err = run(write(), "--slurm", "a100,l4")
    assert (code, out) == (2, "")
    assert one_sentence(err).startswith("autoprec: --slurm: there is no srun on this machine")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ray", "--slurm", "a100"), "--ray and --slurm given; give one of them"),
        (("--ray", "--plan"), "--plan measures nothing, so it needs no cluster; omit --ray"),
        (("--slurm", "a100", "--plan"), "omit --slurm"),
        (("--ray", "--quick"), "--quick is for this machine; omit --ray"),
        (("--slurm", " , "), "expected names of partitions: a100,l4"),
    ],
)
def test_what_makes_no_sense_together_is_refused(
    words: tuple[str, ...], said: str, write: Write, run: Run
) -> None:
    code, out, err = run(write(), *words)
    assert (code, out) == (2, "")
    assert said in one_sentence(err)


def test_a_wrong_task_is_told_before_the_cluster_is_asked(tmp_path: Path, run: Run) -> None:
    code, _, err = run(tmp_path / "model.py", "--ray")
    assert code == 2
    assert "there is no task file" in one_sentence(err)
