"""`autoprec tune` for clusters: what is refused before anything is connected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.commands import Run, Write, one_sentence


@pytest.mark.parametrize(
    ("words", "package"), [(("--ray",), "ray"), (("--submitit", "a100,l4"), "submitit")]
)
def test_without_the_engine_its_extra_is_named(
    words: tuple[str, ...], package: str, write: Write, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = run(write(), *words)
    assert (code, out) == (2, "")
    assert f"pip install 'autoprec[{package}]'" in one_sentence(err)
    assert one_sentence(err).startswith(f"autoprec: --{package}: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ray", "--submitit", "a100"), "--ray and --submitit given; give one of them"),
        (("--ray", "--plan"), "--plan measures nothing, so it needs no cluster; omit --ray"),
        (("--submitit", "a100", "--plan"), "omit --submitit"),
        (("--ray", "--quick"), "--quick is for this machine; omit --ray"),
        (("--submitit", " , "), "expected names of partitions: a100,l4"),
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
