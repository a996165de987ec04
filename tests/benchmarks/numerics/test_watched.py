"""What checks during training found on the zoo, in numbers: alarms, and what was not checked."""

from __future__ import annotations

from typing import Any

from autoprec.core.numerics.watching import WatchedStep
from benchmarks.numerics.watched import summary, table

HEALTHY = (WatchedStep(1, 8, 8, 0.01, -0.002, 0.03), WatchedStep(26, 8, 8, 0.2, None, 0.6))
FAULT = WatchedStep(36, 8, 8, None, 0.5, 0.9, problem="its outputs are not finite", action="warn")


def row(truth: str, *checks: WatchedStep, zoo: str = "zoo", task: str = "t") -> dict[str, Any]:
    return {"zoo": zoo, "task": task, "policy": "float16", "truth": truth} | summary(checks)


def test_the_first_alarm_and_the_largest_numbers_are_kept() -> None:
    assert summary((*HEALTHY, FAULT)) == {
        "checks": 3,
        "failed": 1,
        "alarm": 36,
        "said": "its outputs are not finite",
        "not_checked": "",
        "outputs": 0.2,
        "loss": 0.5,
        "gradient": 0.9,
    }
    assert summary((WatchedStep(9, not_checked="no call"),)) == {
        "checks": 0,
        "failed": 0,
        "alarm": None,
        "said": "",
        "not_checked": "no call",
        "outputs": None,
        "loss": None,
        "gradient": None,
    }


def test_alarms_are_counted_by_what_long_runs_say() -> None:
    rows = [
        row("healthy", *HEALTHY),
        row("healthy", *HEALTHY, FAULT, task="flagged"),
        row("broken", *HEALTHY, FAULT),
        row("broken", WatchedStep(9, not_checked="no call"), task="unseen"),
        row("healthy", *HEALTHY, zoo="zoo_keras"),
    ]
    lines = list(table(rows))
    assert lines[1].startswith("| torch | 1 of 2")
    assert lines[2].startswith("| Keras | 0 of 1")
    assert lines[3:] == [
        "  zoo flagged float16, healthy: alarm at 36: its outputs are not finite",
        "  zoo unseen float16, broken: not checked: no call",
    ]
