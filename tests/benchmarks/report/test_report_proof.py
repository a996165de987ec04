"""The report's tables of the zoo and of a soak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import proof


def test_the_report_of_a_soak_names_no_cause(tmp_path: Path) -> None:
    counts = {"injected": 2, "survived": 1, "trials_lost": 0, "half_written": 0, "survivors": 0}
    older = {"framework": "torch", "faults": {"SIGINT": counts}, "problems": ["SIGINT: exit -2"]}
    path = tmp_path / "soak.json"
    path.write_text(json.dumps({"created": "2026-11-21T17:10:23Z", "seed": 1, "soaks": [older]}))
    lines = list(proof.soak(path))
    assert "| torch | 1 | 2 | 1 | 0 | not looked for | 0 | 0 | not counted | 1 |" in lines
    assert "Not survived, torch: SIGINT." in lines
    now = {
        **older,
        "seed": 3,
        "remeasured": 4,
        "faults": {"SIGINT": {**counts, "missing": 1}},
        "problems": [],
    }
    path.write_text(json.dumps({"created": "2026-11-27T05:41:51Z", "commit": "a", "soaks": [now]}))
    assert list(proof.soak(path))[-1] == "| torch | 3 | 2 | 1 | 0 | 1 | 0 | 0 | 4 | 0 |"
    later = {"commit": "b", "soaks": [{**now, "seed": 4}]}
    (tmp_path / "soak-later.json").write_text(json.dumps(later))
    lines = list(proof.soak(path))
    assert any(line.startswith("Measured again at commit b") for line in lines)
    assert lines[-1] == "| torch | 4 | 2 | 1 | 0 | 1 | 0 | 0 | 4 | 0 |"


def test_a_soaks_earlier_runs_are_shown_with_their_problems_and_no_known_cause(
    tmp_path: Path,
) -> None:
    counts = {"injected": 2, "survived": 2, "trials_lost": 0, "half_written": 0, "survivors": 0}
    good = {"framework": "torch", "seed": 2, "faults": {"SIGINT": counts}, "problems": []}
    again = "SIGINT: again ['float32, batch 32', 'float32, batch 64'], half []: some output"
    bad = {**good, "problems": [again, "run again: ['a', 'b', 'c']"]}
    for name, day, row in (
        ("soak-2026-11-27.json", "2026-11-27", good),
        ("soak-2026-11-27-earlier.json", "2026-11-27", bad),
        ("soak-2026-11-21.json", "2026-11-21", {**good, "seed": 7}),
    ):
        found = {"created": f"{day}T17:10:23Z", "commit": f"of {name}", "soaks": [row]}
        (tmp_path / name).write_text(json.dumps(found))
    lines = list(proof.soak(tmp_path / "soak-2026-11-27.json"))
    assert "Not survived, torch, seed 2: SIGINT, 2 trials ran again." in lines
    assert "Not survived, torch, seed 2: 3 trials ran again." in lines
    assert any(line.endswith("Which these were is not known.") for line in lines)
    assert any("`benchmarks/results/soak-2026-11-21.json`" in line for line in lines)
    assert "| torch | 7 | 2 | 2 | 0 | not looked for | 0 | 0 | not counted | 0 |" in lines


def test_the_report_of_the_zoo_lists_what_it_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"median": 1.0, "median_where_right": 1.0, "largest": 2.0}
    counts = {"broken_caught": [1, 1], "healthy_flagged": [0, 2]}
    wrong = ["zoo a float16 seed 1000: drift, truth healthy (final loss +1.0 %): its loss is away"]
    confusion = {
        "by_zoo": {"zoo": {"both": counts}},
        "cost_by_zoo": {"zoo": costs},
        "wrong": wrong,
        "unclear": ["zoo b bfloat16: final loss +7 %"],
    }
    found = {
        "date": "2026-11-27",
        "tasks": 2,
        "machine": "x",
        "commit": "a",
        "software": {},
        "seeds": {"zoo": [1000]},
        "confusion": confusion,
    }
    path = tmp_path / "numerics.json"
    path.write_text(json.dumps(found))
    lines = list(proof.numerics(path))
    judged = lines.index("- zoo a float16, in truth healthy (final loss +1.0 %) (seeds 1000)")
    assert lines[judged:] == [
        lines[judged],
        "",
        "Not in the table, as long runs left open what becomes of them:",
        "",
        "- zoo b bfloat16: final loss +7 %",
    ]
    del confusion["unclear"]
    path.write_text(json.dumps(found))
    folder = tmp_path / "tests" / "zoo"
    folder.mkdir(parents=True)
    labels = {"float16": {"label": "unclear", "why": "+6 %"}, "bfloat16": {"label": "broken"}}
    (folder / "truth.json").write_text(json.dumps({"tasks": {"c": labels}}))
    monkeypatch.setattr(proof, "ROOT", tmp_path)
    lines = list(proof.numerics(path))
    assert any("this run did not list them" in line for line in lines)
    assert lines[-2:] == ["", "- zoo c float16: +6 %"]
    found["software"] = {"torch": "2.13.0"}
    path.write_text(json.dumps(found))
    assert any("the tuner's own tracer" in line for line in proof.numerics(path))


def test_what_checks_say_of_all_tasks_is_told_by_folder_and_who_is_judged_wrong(
    tmp_path: Path,
) -> None:
    def row(zoo: str, task: str, truth: str, verdict: str, cost: float) -> dict[str, object]:
        about = {"zoo": zoo, "task": task, "policy": "float16", "reason": "why", "by_kind": {}}
        return {**about, "truth": truth, "verdict": verdict, "cost": cost}

    head = {"date": "2026-11-29", "commit": "a", "family": "amd-zen4", "seed": 1000}
    first = row("zoo", "one", "healthy", "equal", 150.0)
    missed = row("zoo_keras", "two", "broken", "equal", 130.0)
    flagged = row("zoo_keras", "three", "healthy", "drift", 170.0)
    doubtful = row("zoo_keras", "four", "unclear", "drift", 170.0)
    before = {**head, "commit": "b", "rows": [{**first, "cost": 200.0}]}
    path = tmp_path / "costs.json"
    path.with_name("costs-earlier.json").write_text(json.dumps(before))
    rows = [first, missed, flagged, doubtful]
    path.write_text(json.dumps({**head, "note": "Some were left out.", "rows": rows}))
    lines = list(proof.proof_costs(path))
    assert "| zoo | float16 | equal | 1 | 150 | 200 |" in lines
    told = {line.split(" | ")[0]: line for line in lines if line.startswith("| zoo_keras |")}
    assert "| 3 | 0 of 1 (" in told["| zoo_keras"]
    assert "1 of 1 (" in told["| zoo_keras"]
    assert told["| zoo_keras"].endswith("| 170 |")
    assert lines[-1] == "Some were left out."
    assert lines[-3] == (
        "Judged wrong: zoo_keras two in float16 (equal, in truth broken); "
        "zoo_keras three in float16 (drift, in truth healthy)."
    )
