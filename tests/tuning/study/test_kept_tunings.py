"""What a study's place holds is read whatever version kept it."""

from __future__ import annotations

from pathlib import Path

from fuzz.example import FULL

from autoprec.core.codec import to_plain
from autoprec.tuning.study.kept_tunings import read_tunings
from autoprec.tuning.study.notes import RESULT, StoredProfile, StudyNote
from autoprec.tuning.study.study import Study


def test_a_tuning_that_an_earlier_version_finished_has_its_profile(tmp_path: Path) -> None:
    kept = to_plain(StoredProfile(FULL, ""))
    kept["profile"]["schema"] = 1
    del kept["profile"]["evidence"]["throughput"]
    kept["profile"]["evidence"]["speedup_same_batch"] = None
    place = tmp_path / "study.journal"
    Study(place, "model").remember(StudyNote(RESULT.name, object), kept)
    (found,) = read_tunings(place)
    assert found.profile == FULL


def test_a_result_that_is_none_leaves_the_tuning_unfinished(tmp_path: Path) -> None:
    for number, kept in enumerate([{"profile": None}, {"profile": {"schema": 9}}, [], "done"]):
        place = tmp_path / f"{number}.journal"
        Study(place, "model").remember(StudyNote(RESULT.name, object), kept)
        (found,) = read_tunings(place)
        assert found.profile is None
