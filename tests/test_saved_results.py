"""Where the profile of a tuning is written: a conclusive one that is there stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fuzz.example import FULL

from autoprec.profiles import kept_beside, load_profile, save_result


def test_an_inconclusive_result_never_replaces_a_conclusive_one(tmp_path: Path) -> None:
    good = replace(FULL, evidence=replace(FULL.evidence, inconclusive=""))
    bad = replace(FULL, evidence=replace(FULL.evidence, inconclusive="it ran at two paces"))
    path, beside = tmp_path / "m.profile.yaml", tmp_path / "m.inconclusive.profile.yaml"
    assert save_result(bad, path) == path
    assert save_result(bad, path) == path
    assert save_result(good, path) == path
    assert save_result(bad, path) == save_result(bad, path) == beside
    assert load_profile(path) == good
    assert load_profile(beside) == bad
    said = kept_beside(path, beside)
    assert str(path) in said
    assert str(beside) in said
    assert kept_beside(path, path) == ""
    other = tmp_path / "p.yaml"
    other.write_text("no profile")
    assert save_result(bad, other) == other
    save_result(good, other)
    assert save_result(bad, other) == tmp_path / "p.inconclusive.yaml"
