"""`autoprec show`, `report` and `diff`: a profile to read, to look at, and to compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.cli import main
from autoprec.profiles import save_profile, to_mapping
from tests.fuzz.example import FULL, PLAIN_FLOAT32

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return command


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_profile(FULL, tmp_path / "model.profile.yaml")
    return tmp_path / "model.profile.yaml"


def test_show_says_recipe_verdict_origin_and_warnings(saved: Path, run: Run) -> None:
    code, out, err = run("show", saved)
    assert (code, err) == (0, "")
    assert out.startswith("model.py: mixed_float16, batch 512 in 2 micro-batches of 256, ")
    assert "numerics: equal: trains like float32" in out
    assert "made on AMD EPYC (amd-zen4) with python 3.11.7, torch 2.13.0" in out
    assert "refused: mixed_bfloat16: emulated on this device" in out
    assert "warning: the loader is slow" in out


def test_show_as_json_is_the_file(saved: Path, run: Run) -> None:
    code, out, _ = run("show", saved, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(to_mapping(FULL)))


def test_a_report_is_written_next_to_the_profile(saved: Path, run: Run) -> None:
    code, out, err = run("report", saved)
    assert code == 0
    page = saved.with_name("model.report.html")
    assert out == f"{page}\n"
    assert err.startswith("wrote ")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_folder_and_several_files_are_compared(
    saved: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.yaml"
    save_profile(PLAIN_FLOAT32, other)
    assert run("report", tmp_path)[1] == f"{tmp_path / 'profiles.report.html'}\n"
    both = tmp_path / "both.html"
    assert run("report", saved, other, "-o", both)[0] == 0
    for page in (tmp_path / "profiles.report.html", both):
        assert "other.yaml" in page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run("report", saved, other)[1] == "profiles.report.html\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no.yaml",), "there is no such file"),
        (("PROFILE", "-o", "r.pdf"), "expected a file ending in .html"),
        (("PROFILE", "-o", "gone/r.html"), "there is no folder gone"),
    ],
)
def test_a_report_that_cannot_be_made_says_why_and_writes_nothing(
    saved: Path, run: Run, words: tuple[str, ...], said: str
) -> None:
    code, out, err = run("report", *(str(saved) if w == "PROFILE" else w for w in words))
    assert (code, out) == (2, "")
    assert said in err
    assert list(saved.parent.glob("*.html")) == []


def test_diff_names_what_differs_and_its_exit_code_says_whether_the_recipe_does(
    saved: Path, tmp_path: Path, run: Run
) -> None:
    assert run("diff", saved, saved) == (0, "the same recipe\n", "")
    newer = tmp_path / "newer.yaml"
    save_profile(replace(FULL, software={"python": "3.11.7", "torch": "2.14.0"}), newer)
    assert run("diff", saved, newer)[:2] == (
        0,
        "the same recipe\nsoftware:\n  torch: 2.13.0 -> 2.14.0\n",
    )
    save_profile(replace(FULL, recipe=replace(FULL.recipe, batch_size=128)), newer)
    code, out, _ = run("diff", saved, newer)
    assert (code, out) == (1, "different recipes\nrecipe:\n  batch_size: 256 -> 128\n")
    code, out, _ = run("diff", saved, newer, "--json")
    found = json.loads(out)
    assert (code, found["same_recipe"]) == (1, False)
    assert found["recipe"] == [{"key": "batch_size", "first": 256, "second": 128}]
