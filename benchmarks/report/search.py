"""The report's tables of tunings: against a grid, beside peers, the hold-out, every machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.core.speed.attribution import PRECISION
from benchmarks.checkout import HOLDOUT, RESULTS, TASKS
from benchmarks.peers.rows import peer_table
from benchmarks.provenance import lines_of
from benchmarks.report import gpu
from benchmarks.report.latest import latest, machine_name, measured_again, newest_rows, where
from benchmarks.search.oracle_rows import (
    NOT_MEASURED,
    Row,
    chosen,
    explanation,
    mean,
    over_alike,
    ratio_text,
    summary,
    table,
    words,
)

#: The task that the README shows on every machine.
SHOWN = "encoder"

#: The files whose heads tell that a machine was measured at all.
MEASURED = ("oracle-*.jsonl", "peers-*.jsonl", "growth-*.json", "holdout-*.json")


def oracle(path: Path) -> Iterator[str]:
    """One of a machine's runs: its newest, or an earlier one with tasks that the newest lacks."""
    rows = lines_of(path)
    first = rows[0]
    yield (
        f"{where(first)}, torch {first['torch']}, Keras {first['keras']} on "
        f"TensorFlow {first['tensorflow']}. {explanation(rows)}"
    )
    yield ""
    yield from table(rows)
    yield ""
    yield summary(rows)
    newest = newest_rows("oracle", path.parent)
    measured = {r["task"] for r in newest if r.get("family") == first.get("family")}
    missing = {path.stem for path in TASKS.glob("*.py")} - measured
    if missing:
        yield ""
        yield f"Not measured on this machine: {', '.join(sorted(missing))}."
    yield from notes(rows)
    yield from measured_again(path, lambda later: table(lines_of(later)))


def notes(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is to be known of single rows, and of which."""
    for note in dict.fromkeys(r["note"] for r in results if "note" in r):
        named = ", ".join(r["task"] for r in results if r.get("note") == note)
        yield ""
        yield f"{named}: {note}."


def runs_of(task: str, folder: Path = RESULTS) -> int:
    """How many rows of a task there are in all files, earlier runs included."""
    files = [lines_of(path) for path in folder.glob("oracle-*.jsonl")]
    return sum(row["task"] == task for rows in files for row in rows)


def best_and_worst(folder: Path = RESULTS) -> list[Row]:
    """Of each task the newest row of the machine with the best chosen/best, then of the worst.

    Rows that are marked as older than the rest of their file are left out.
    """
    newest = newest_rows("oracle", folder)
    found: list[Row] = []
    for task in sorted({row["task"] for row in newest if not row.get("older")}):
        own = [row for row in newest if row["task"] == task and not row.get("older")]
        own.sort(key=lambda row: -row["chosen_over_best"]["ratio"])
        found += own if len(own) == 1 else [own[0], own[-1]]
    return found


def oracle_summary(folder: Path = RESULTS) -> Iterator[str]:
    """The README's table: each task where chosen/best came out best, and where worst."""
    rows = best_and_worst(folder)
    if not rows:
        yield "No result yet: `python -m benchmarks.search.oracle` prints it."
        return
    runs = {task: runs_of(task, folder) for task in {row["task"] for row in rows}}
    yield (
        "Each task on the machine where chosen/best came out best, and on the one where it came "
        "out worst; *runs* counts the task's runs on all machines, whose earlier ones are in "
        f"`benchmarks/results/`. {explanation(rows)}"
    )
    yield ""
    machines = [f"{machine_name(row['family'])}, {row['date']}" for row in rows]
    extra = {"machine": machines, "runs": [str(runs[row["task"]]) for row in rows]}
    yield from table(rows, extra)
    for path in latest("oracle", "jsonl", folder):
        own = lines_of(path)
        yield ""
        yield f"{where(own[0])}. {summary(own)}"


# Every machine ------------------------------------------------------------------------------------


def machines(folder: Path = RESULTS) -> Iterator[str]:
    """What was chosen for one task on every machine measured so far, and why."""
    columns = (
        "machine",
        "measured",
        "chosen",
        "over float32 as it was run",
        "over float32 alike",
        "why",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for name, row in tuned(folder).items():
        yield f"| {' | '.join([name, *(cells_of(row) if row else [NOT_MEASURED] * 5)])} |"


def tuned(folder: Path = RESULTS) -> dict[str, Row | None]:
    """By machine the newest tuning of the task shown; None where others only were measured."""
    found: dict[str, Row | None] = {}
    for row in newest_rows("oracle", folder):
        if row["task"] == SHOWN:
            found[machine_name(row["family"])] = row
    for pattern in MEASURED:
        for path in sorted(folder.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            head = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
            found.setdefault(machine_name(head.get("family", "intel-amx")), None)
    for device, pieces in gpu.read(folder).items():
        rows = pieces.get(f"tune-{SHOWN}", ())
        found[device] = gpu_row(rows[0]) if rows and "recipe" in rows[0] else None
    return found


def gpu_row(row: Row) -> Row:
    """A GPU's tuning in the form of an oracle's row."""
    evidence = row["evidence"]
    parts = {part["what"]: part["speedup"] for part in evidence.get("waterfall", ())}
    return {
        "date": row["date"],
        "recipes": {"chosen": row["recipe"]},
        "chosen_over_float32": evidence["speedup"],
        "chosen_over_float32_alike": parts.get(PRECISION),
        "reason": evidence["reason"],
    }


def cells_of(row: Row) -> list[str]:
    """A tuning's date, recipe, ratios and reason."""
    return [
        row["date"],
        chosen(row),
        ratio_text(row["chosen_over_float32"], 2),
        over_alike(row),
        why(row["reason"]),
    ]


def why(reason: str) -> str:
    """The reason of a profile without the ratio, which has a column of its own."""
    first, _, rest = reason.replace("|", "/").partition(" rounds) and ")
    return rest or first or "not kept"


# Beside the peers, and the hold-out ---------------------------------------------------------------


def peers(path: Path) -> Iterator[str]:
    """One machine's newest comparison with the peers."""
    rows = lines_of(path)
    first = rows[0]
    yield (
        f"{where(first)}, torch {first['torch']}, lightning {first['lightning']}, "
        f"accelerate {first['accelerate']}, pytorch-autotune {first['pytorch-autotune']}."
    )
    for row in rows:
        if row.get("commit") != first.get("commit"):
            yield f"{row['task']} at commit {row['commit']}."
    yield ""
    yield from peer_table(rows)
    yield from notes(rows)


def holdout(path: Path) -> Iterator[str]:
    """The tasks that no change of the tuner was developed on."""
    found = json.loads(path.read_text(encoding="utf-8"))
    yield (
        f"{where(found)}. Six tasks that no change of the tuner may be developed on, run once for "
        "a release: tuned as the README says, then the profile applied in fresh processes, in "
        "alternation with the loop as it was, and with the same loop at the chosen batch."
    )
    yield ""
    yield (
        "| task | framework | chosen | tuned in | said | applied/plain loop | "
        "applied/plain loop at its batch | proof |"
    )
    yield "|---" * 8 + "|"
    for r in found["rows"]:
        if "failed" in r:
            yield f"| {r['task']} | {r['framework']} | failed: {r['failed']} |" + " - |" * 5
            continue
        yield (
            f"| {r['task']} | {r['framework']} | {words(r['recipe'])} | {r['seconds']:.0f} s | "
            f"{ratio_text(r['said'], 2)} | {ratio_text(r['applied_over_plain'], 2)} | "
            f"{ratio_text(r['applied_over_plain_at_its_batch'], 2)} | {r['verdict']} |"
        )
    ratios = [r["applied_over_plain"]["ratio"] for r in found["rows"] if "failed" not in r]
    if ratios:
        yield ""
        yield f"In the geometric mean {mean(ratios):.2f}x, at worst {min(ratios):.2f}x."
    ran = {row["task"] for row in found["rows"]}
    left = sorted({path.stem for path in HOLDOUT.glob("*.py")} - ran)
    if left:
        yield ""
        yield f"Not run to the end here: {', '.join(left)}."
