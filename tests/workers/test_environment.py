"""What a worker is told of launchers: its own place among our ranks, and nobody else's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoprec.backends.protocol import RankPlace
from autoprec.workers.environment import OuterLauncher, outer_launcher, rank_environment

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_launcher_is_known_by_the_ranks_it_started() -> None:
    launcher = outer_launcher(TORCHRUN)
    assert launcher == OuterLauncher(rank=1, world_size=2, local_world_size=2)
    assert launcher.one_machine
    far = outer_launcher({**TORCHRUN, "WORLD_SIZE": "4"})
    assert far is not None
    assert not far.one_machine


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "8"},
        {"RANK": "0"},
        {"WORLD_SIZE": "many", "RANK": "0"},
    ],
)
def test_a_process_without_fellows_has_no_launcher(environment: dict[str, str]) -> None:
    assert outer_launcher(environment) is None


def test_a_rank_is_told_what_a_launcher_would_tell_it() -> None:
    place = RankPlace(rank=1, local_rank=1, world_size=2, port=29501)
    told = rank_environment(place)
    assert outer_launcher(told) == OuterLauncher(1, 2, 2)
    assert told["MASTER_PORT"] == "29501"
    assert told.keys() <= TORCHRUN.keys()


def test_a_worker_does_not_see_the_tuners_launcher(start, tmp_path: Path, monkeypatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    seen = tmp_path / "seen.json"
    task = tmp_path / "looks.py"
    task.write_text(
        "import json, os, pathlib\n"
        "from simulated import SimulatedModel\n"
        f"pathlib.Path({str(seen)!r}).write_text(json.dumps(dict(os.environ)))\n"
        "def build_model(): return SimulatedModel()\n"
        "def build_data(batch_size): return []\n"
    )
    start(task, environment={"OF_ITS_OWN": "1"}).load()
    environment = json.loads(seen.read_text())
    assert not TORCHRUN.keys() & environment.keys()
    assert environment["OF_ITS_OWN"] == "1"
