"""What a soak counts as lost: trials, files and processes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmark_rows import SPACE, outcome

from benchmarks.faults import soak, soaked_tuning


def test_a_trial_that_was_said_and_is_not_kept_is_missing() -> None:
    said = Counter(["float32, batch 8", "mixed_bfloat16, batch 64 in 2 micro-batches of 32"])
    kept = Counter({("float32", 8): 1, ("mixed_bfloat16", 32): 1})
    assert soaked_tuning.missing_trials(said, kept) == []
    lost = soaked_tuning.missing_trials(said, Counter({("float32", 8): 1}))
    assert lost == ["mixed_bfloat16, batch 32"]
    twice = Counter(["float32, batch 8", "float32, batch 8, memory kept"])
    assert soaked_tuning.missing_trials(twice, Counter({("float32", 8): 1})) == ["float32, batch 8"]
    with pytest.raises(ValueError, match="expected a recipe such as"):
        soaked_tuning.missing_trials(Counter(["?"]), Counter())


def test_what_a_journal_holds_is_counted(tmp_path: Path) -> None:
    from autoprec.tuning.study.study import Study

    study = Study(str(tmp_path / "a.journal"), "name")
    study.set_space(SPACE)
    for point in SPACE.points()[:3]:
        trial, asked = study.ask(point)
        study.tell(trial, outcome(asked, 2.0))
    study.ask(SPACE.points()[5])  # said by nobody to have finished
    kept = soaked_tuning.kept_trials(tmp_path / "a.journal")
    assert sum(kept.values()) == 3
    assert kept["float32", 8] == 2


def test_a_file_that_nobody_knows_is_half_written(tmp_path: Path) -> None:
    place = soaked_tuning.SoakedTuning("simulated", tmp_path / "s", random.Random(0))
    place.clean()
    for name in (place.journal.name, f"{place.journal.name}.lock", place.profile.name):
        (place.folder / name).write_text("")
    assert place.unknown_files() == []
    (place.folder / ".task.profile.yaml.x1").write_text("")
    assert place.unknown_files() == [".task.profile.yaml.x1"]


def test_faults_are_shared_out_over_the_seeds() -> None:
    assert soak.shared_out(10, 4) == [3, 3, 2, 2]


def test_what_is_wrong_when_a_tuning_has_ended_is_laid_to_its_last_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = tmp_path / "task.profile.yaml"
    profile.write_text("recipe: {policy: float32}\n")
    left = SimpleNamespace(
        framework="torch",
        journal=tmp_path / "journal",
        profile=profile,
        unknown_files=lambda: [".half"],
        survivors=lambda: ["a worker"],
    )
    monkeypatch.setattr(soak, "kept_trials", lambda journal: Counter({("float32", 8): 1}))
    one = soak.Soak(left, random.Random(0))
    one.counts["SIGKILL"] = soak.Count(injected=1, survived=1)
    one._last = ("SIGKILL", True)
    one._compare(Counter(["float32, batch 8", "float32, batch 16"]))
    assert vars(one.counts["SIGKILL"]) == {
        "injected": 1,
        "survived": 0,
        "trials_lost": 0,
        "missing": 1,
        "half_written": 1,
        "survivors": 1,
    }
    assert "missing ['float32, batch 16']" in one.problems[0]


def test_a_tuning_that_ran_no_trial_is_no_evidence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So it was when studies had moved to the cache: the second tuning found the first one's."""
    child = SimpleNamespace(communicate=lambda timeout: ("", "the result is known"), returncode=0)
    place = soaked_tuning.SoakedTuning("simulated", tmp_path / "s", random.Random(0))
    monkeypatch.setattr(place, "start", lambda: child)
    with pytest.raises(SystemExit, match="ran no trial"):
        soak.Soak(place, random.Random(0)).run(1)
    place.profile.write_text("recipe: {policy: float32}\n")
    monkeypatch.setattr(soak, "kept_trials", lambda journal: Counter())
    one = soak.Soak(place, random.Random(0), recipe={"policy": "float32"})
    one._compare(Counter())
    assert one.problems == ["a tuning said of no trial that it was finished"]


def test_trials_that_another_speed_makes_a_tuning_measure_again_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trial = "  trial  1  float32, batch 8: 10 samples/s"
    changed = f"this machine now runs at 0.1x the speed {soaked_tuning.MEASURED_AGAIN}"
    for resumed, lost in (([trial], 1), ([changed, trial], 0)):
        said = iter([(trial, -9), ("\n".join(resumed), 0)])
        place = soaked_tuning.SoakedTuning("torch", tmp_path / "s", random.Random(0))
        monkeypatch.setattr(place, "start", lambda full_after, said=said: _child(*next(said)))
        one = soak.Soak(place, random.Random(0))
        monkeypatch.setattr(one, "_draw", lambda: soak.FAULTS[0])
        monkeypatch.setattr(one, "_strike", lambda child, fault: True)
        monkeypatch.setattr(one, "_compare", lambda finished: None)
        one._one_tuning(2)
        assert one.counts["SIGKILL to the tuner"].trials_lost == lost
        assert one.remeasured == 1 - lost


def _child(text: str, code: int) -> SimpleNamespace:
    return SimpleNamespace(communicate=lambda timeout: ("", text), returncode=code)


def test_a_tuning_says_so_in_the_words_that_the_soak_looks_for() -> None:
    from autoprec.tuning.search.loop import pace_change_note

    assert soaked_tuning.MEASURED_AGAIN in pace_change_note(0.1)
