"""`autoprec tune` under a launcher: rank 0 tunes for all, the others say so and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.cli.tune import ranks_to_tune
from autoprec.errors import UsageError
from tests.cli.commands import Run, Write, one_sentence

pytestmark = pytest.mark.usefixtures("unmeasured")


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, local: int) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_without_a_launcher_it_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_to_tune(None) == 1
    assert ranks_to_tune(4) == 4
    launched(monkeypatch, rank=0, world=1, local=1)
    assert ranks_to_tune(None) == 1
    assert ranks_to_tune(4) == 4


def test_rank_0_tunes_for_as_many_as_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, rank=0, world=4, local=4)
    assert ranks_to_tune(None) == ranks_to_tune(4) == 4
    with pytest.raises(UsageError, match="--nproc 2 given, but the launcher started 4 processes"):
        ranks_to_tune(2)


def test_another_rank_ends_well_and_says_why(
    write: Write, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, rank=1, world=2, local=2)
    code, out, err = run(write())
    assert (code, out) == (0, "")
    assert one_sentence(err) == err.strip()
    assert "rank 0 tunes with 2 rank processes of its own" in err
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize("rank", [0, 5])
def test_several_machines_are_refused_on_each(
    rank: int, write: Write, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, rank=rank, world=8, local=4)
    code, _, err = run(write())
    assert code == 2
    assert "8 processes on several machines" in one_sentence(err)
