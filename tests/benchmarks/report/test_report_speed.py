"""The report's table of the overhead says what is promised and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmark_rows import BF16, ratio

from autoprec.core.codec import to_plain
from benchmarks.overhead import fit
from benchmarks.report import speed


def test_the_report_of_the_overhead_says_what_is_promised_and_what_is_kept(tmp_path: Path) -> None:
    pairs = [fit.Pair(s, s * 1.02, s, 8) for s in (0.001, 0.005)]
    found = {
        "date": "2026-12-01",
        "family": "amd-zen4",
        "processes": 6,
        "cases": [fit.case(fit.TORCH, "float32", [pair] * 6) for pair in pairs],
        "fixed": [fit.fixed(fit.TORCH, "float32", [pairs] * 6)],
    }
    path = tmp_path / "overhead.json"
    path.write_text(json.dumps(found))
    lines = list(speed.overhead(path))
    assert "stale or not is unknown" in lines[0]
    short, long = [line for line in lines if line.startswith("| torch loop |")][:2]
    assert long.endswith("| +100 us (+100 to +100) | no |")
    assert short.endswith("| nothing promised |")
    assert lines[-1].endswith(
        "at most 10 us | yes | +20 us (+20 to +20) of 1.00 ms | not measured |"
    )
    text = "\n".join(lines)
    assert "Of 1 promises about a step's ratio 0 are shown to be kept, 1 are broken" in text
    assert "Broken: torch loop, float32, 5.00 ms (1.0200)." in text
    path.write_text(json.dumps([{**found["cases"][0], "overhead_microseconds": 3.0, **ratio(1)}]))
    assert "One process a case" in "\n".join(speed.overhead(path))


def case(milliseconds: float, middle: float, low: float) -> dict[str, Any]:
    cost = {"middle": 1e-6 * middle, "low": 1e-6 * low, "high": 1e-6 * (2 * middle - low)}
    return {"step_milliseconds": milliseconds, "cost": cost}


def test_the_cost_of_short_steps_says_how_it_grows_where_that_is_resolved() -> None:
    cases = [case(2.0, 24, 12), case(0.5, 6, 5), case(100.0, 900, 800)]
    assert speed.short_steps(cases) == ("+6 us (+5 to +7) of 0.50 ms", "1.2%")
    assert speed.short_steps([*cases, case(1.0, 9, -1)])[1] == "unresolved"


def test_a_disturbed_tunings_earlier_run_is_shown_and_the_worst_is_first(tmp_path: Path) -> None:
    head = {"date": "2026-12-01", "family": "amd-zen5", "torch": "2.13.0"}
    row = {"task": "mlp", "idle": to_plain(BF16), "disturbed": to_plain(BF16)}
    row |= {"busy_seconds": 5.0, "tuning_seconds": 9.0, "inconclusive": ""}
    rows = [{**row, "disturbed_over_idle": ratio(value)} for value in (1.0, 0.95)]
    path = tmp_path / "regret-2026-12-01-amd-zen5.json"
    path.write_text(json.dumps({**head, "commit": "now", "rows": rows}))
    worse = [{**row, "disturbed_over_idle": ratio(0.9)}]
    earlier = {**head, "commit": "before", "rows": worse}
    path.with_name(f"{path.stem}-earlier.json").write_text(json.dumps(earlier))
    lines = list(speed.regret(path))
    found = [line.split(" | ")[-1] for line in lines if line.startswith("| mlp |")]
    assert [text[:5] for text in found] == ["0.950", "1.000", "0.900"]
    assert any(line.startswith("An earlier run at commit before (") for line in lines)


def test_false_speed_ups_of_days_before_are_shown_of_the_same_machine(tmp_path: Path) -> None:
    for day, family, said in (
        ("2026-12-02", "amd-zen5", "none"),
        ("2026-12-01", "amd-zen5", "three of ten"),
        ("2026-12-01", "amd-zen3", "of another machine"),
    ):
        found = {"date": day, "family": family, "runs": {"torch": {"summary": said}}}
        (tmp_path / f"null-{day}-{family}.json").write_text(json.dumps(found))
    text = "\n".join(speed.null(tmp_path / "null-2026-12-02-amd-zen5.json"))
    assert text.index("- torch: none.") < text.index("- torch: three of ten.")
    assert "another machine" not in text


def test_a_column_that_no_row_fills_is_not_shown(tmp_path: Path) -> None:
    row = {"task": "mlp", "recipe": to_plain(BF16), "claimed": ratio(2), "applied": ratio(1.9)}
    path = tmp_path / "applied.json"
    head = {"date": "2026-12-01", "family": "amd-zen5", "torch": "2.13.0"}
    path.write_text(json.dumps({**head, "rows": [{**row, "claimed_same_batch": None}]}))
    lines = list(speed.applied(path))
    assert lines[2] == "| task | chosen | claimed | in fresh processes |"
    assert lines[0].endswith("over the plain loop.")
    filled = [row, {**row, "task": "lstm", "applied_same_batch": ratio(1.5)}]
    path.write_text(json.dumps({**head, "rows": filled}))
    lines = list(speed.applied(path))
    assert lines[2].endswith("| in fresh processes | in fresh processes at its batch |")
    assert any(line.endswith("| not measured |") for line in lines)
