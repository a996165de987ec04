"""The report's tables of tunings: against a grid, beside peers, the hold-out, every machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoprec.core.codec import from_plain
from autoprec.core.number_words import times
from autoprec.core.recipe import Recipe
from autoprec.core.speed.attribution import PRECISION
from benchmarks.checkout import HOLDOUT, RESULTS, TASKS
from benchmarks.peers.rows import in_a_line, peer_table
from benchmarks.provenance import lines_of
from benchmarks.report import gpu
from benchmarks.report.latest import (
    earlier_days,
    head_of,
    latest,
    machine_name,
    newest_rows,
    other_runs,
    where,
)
from benchmarks.search.oracle_rows import (
    BEST_FOUND,
    NOT_MEASURED,
    ONCE,
    TWICE,
    Row,
    chosen,
    explanation,
    mean,
    measured_twice,
    over_alike,
    ratio_text,
    summary,
    table,
    words,
    worst_first,
)

#: The task that is shown on every machine.
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
    yield from oracle_table(rows)
    yield ""
    yield summary(rows)
    newest = newest_rows("oracle", path.parent)
    measured = {r["task"] for r in newest if r.get("family") == first.get("family")}
    missing = {path.stem for path in TASKS.glob("*.py")} - measured
    if missing:
        yield ""
        yield f"Not measured on this machine: {', '.join(sorted(missing))}."
    yield from notes(rows)
    yield from other_runs(path, lambda other: oracle_table(lines_of(other)))


def oracle_table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows, the worst first, and whose grid is of another commit than the tuning."""
    yield from table(worst_first(rows))
    for commit in dict.fromkeys(r.get("grid_commit") for r in rows):
        if named := [
            r["task"] for r in rows if commit and r["commit"] != commit == r["grid_commit"]
        ]:
            yield ""
            yield f"The grid of {', '.join(named)} was measured at commit {commit}."


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


def worst_and_best(folder: Path = RESULTS) -> list[Row]:
    """Of each task the newest row of the machine with the worst chosen/best, and of the best.

    A grid whose best was measured once is a weaker rival, so where there is a row of a best that
    was measured twice, only such a row counts as the best. Rows that are marked as older than the
    rest of their file are left out.
    """
    newest = [row for row in newest_rows("oracle", folder) if not row.get("older")]
    found: list[Row] = []
    for task in sorted({row["task"] for row in newest}):
        own = worst_first([row for row in newest if row["task"] == task])
        best = (list(filter(measured_twice, own)) or own)[-1]
        found += [best] if own[0] is best else [own[0], best]
    return worst_first(found)


def oracle_summary(folder: Path = RESULTS) -> Iterator[str]:
    """Each task where chosen/best came out worst, and where best."""
    rows = worst_and_best(folder)
    if not rows:
        yield "No result yet: `python -m benchmarks.search.oracle` prints it."
        return
    yield (
        "Each task on the machine where chosen/best came out worst, and on the one where it came "
        f"out best; the worst first. Where there are bests that were {TWICE}, only such a row "
        "counts as best. *runs* counts the task's runs on all machines, whose earlier ones are in "
        f"`benchmarks/results/`. {explanation(rows)}"
    )
    yield ""
    extra = {
        "machine": [f"{machine_name(row['family'])}, {row['date']}" for row in rows],
        "runs": [str(runs_of(row["task"], folder)) for row in rows],
        BEST_FOUND: [TWICE if measured_twice(row) else ONCE for row in rows],
    }
    yield from table(rows, extra)
    for path in latest("oracle", "jsonl", folder):
        own = lines_of(path)
        yield ""
        yield f"{where(own[0])}, the best {_how_often(own)}. {summary(own)}"


def _how_often(rows: Sequence[Row]) -> str:
    """How often the best of a file's grids was measured."""
    found = {TWICE if measured_twice(row) else ONCE for row in rows}
    return " or ".join(sorted(found))


# Every machine ------------------------------------------------------------------------------------


def machines(folder: Path = RESULTS) -> Iterator[str]:
    """What was chosen for one task on every machine measured so far, and why."""
    columns = (
        "machine",
        "measured",
        "chosen",
        "over float32 as it was run",
        "in fresh processes",
        "over float32 alike",
        "why",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for name, rows in tuned(folder).items():
        for row in rows or (None,):
            cells = cells_of(row) if row else [NOT_MEASURED] * 6
            yield f"| {' | '.join([name, *cells])} |"


def tuned(folder: Path = RESULTS, task: str = SHOWN) -> dict[str, list[Row]]:
    """By machine the newest tunings of a task; none where others only were measured.

    There is one of the comparison with a grid and one of profiles in fresh processes, the newest
    first: each has what the other lacks.
    """
    found: dict[str, list[Row]] = {}
    for row in newest_rows("oracle", folder):
        if row["task"] == task:
            found[machine_name(row["family"])] = [row]
    for path in latest("applied", folder=folder):
        head = head_of(path)
        for row in head["rows"]:
            if row["task"] == task:
                own = found.setdefault(machine_name(head["family"]), [])
                own.append(applied_row(head["date"], row))
    for pattern in MEASURED:
        for path in sorted(folder.glob(pattern)):
            if family := head_of(path).get("family"):
                found.setdefault(machine_name(family), [])
    for device, pieces in gpu.read(folder).items():
        rows = pieces.get(f"tune-{task}", ())
        own = found.setdefault(device, [])
        own += [gpu_row(rows[0])] if rows and "recipe" in rows[0] else []
    return {
        name: sorted(rows, key=lambda row: str(row["date"]), reverse=True)
        for name, rows in found.items()
    }


def applied_row(date: str, row: Row) -> Row:
    """A tuning whose profile was applied in fresh processes in the form of an oracle's row.

    A recipe without further settings differs from float32 at its batch by its precision alone.
    """
    plain = from_plain(Recipe, row["recipe"]).settings == Recipe().settings
    return {
        "date": date,
        "recipes": {"chosen": row["recipe"]},
        "chosen_over_float32": row["claimed"],
        "chosen_over_float32_alike": row.get("claimed_same_batch") if plain else None,
        "applied": row["applied"],
        "reason": row["inconclusive"],
    }


def gpu_row(row: Row) -> Row:
    """A GPU's tuning in the form of an oracle's row."""
    evidence = row["evidence"]
    parts = {part["what"]: part["speedup"] for part in evidence.get("waterfall", ())}
    return {
        "date": row["date"],
        "recipes": {"chosen": row["recipe"]},
        "chosen_over_float32": gpu.gains(evidence)[0],
        "chosen_over_float32_alike": parts.get(PRECISION),
        "reason": evidence["reason"],
    }


def cells_of(row: Row) -> list[str]:
    """A tuning's date, recipe, ratios and reason."""
    return [
        row["date"],
        chosen(row),
        ratio_text(row["chosen_over_float32"]),
        ratio_text(row["applied"]) if "applied" in row else NOT_MEASURED,
        over_alike(row),
        why(row["reason"], row["date"]),
    ]


#: The day since which each operation counts once. Before, those below a list or a dictionary of
#: modules counted twice or more, and what a reason says of arithmetic rests on them.
COUNTED_ONCE_SINCE = "2026-11-28"

_TIME = r"[\d.e+-]+ ms"
_OF_ARITHMETIC = re.compile(
    rf"the step takes ({_TIME}), {_TIME} of it arithmetic at peak"
    rf"|{_TIME} of arithmetic in a step of ({_TIME})"
    rf"|the step is overhead-bound: {_TIME} of arithmetic in ({_TIME})"
)


def why(reason: str, date: str) -> str:
    """The reason of a profile without the ratio, which has a column of its own.

    Of results of before `COUNTED_ONCE_SINCE` nothing is left of arithmetic but the step's time.
    """
    if date < COUNTED_ONCE_SINCE:
        reason = _OF_ARITHMETIC.sub(
            lambda said: f"the step takes {next(filter(None, said.groups()))}", reason
        )
    first, _, rest = reason.replace("|", "/").partition(" rounds) and ")
    return rest or first or "not kept"


# Beside the peers, and the hold-out ---------------------------------------------------------------


def peers(path: Path) -> Iterator[str]:
    """One machine's newest comparison with the peers."""
    rows = lines_of(path)
    first = rows[0]
    yield (
        f"{where(head_of(path))}, torch {first['torch']}, lightning {first['lightning']}, "
        f"accelerate {first['accelerate']}, pytorch-autotune {first['pytorch-autotune']}."
    )
    for row in rows:
        if row.get("commit") != first.get("commit"):
            yield f"{row['task']} at commit {row['commit']}."
    yield ""
    yield from peer_table(rows)
    yield from notes(rows)
    yield from other_runs(path, lambda other: [in_a_line(lines_of(other))], older=True)


#: What changed between two runs on tasks held out, by their commits.
BETWEEN = {
    ("16ce2fb", "31b1535"): (
        "Between the two runs the tuner changed: on a CPU it renews its sessions and workers "
        "between rounds (acc4769, 2e9d218, d474467), and times float32 at the winner's batch where "
        "its step is short (a6f673e). The first run's result was known by then, so the second one "
        "is no blind test of these changes."
    ),
}


def holdout(path: Path) -> Iterator[str]:
    """The tasks that no change of the tuner was developed on: all runs of a machine."""
    found = head_of(path)
    before = [head_of(run) for run in earlier_days(path)]
    times = {0: "once", 1: "twice"}.get(len(before), f"{1 + len(before)} times")
    yield (
        f"{where(found)}. Six tasks that no change of the tuner may be developed on, meant to be "
        f"run once for a release, run {times} on this machine: tuned as the README says, then the "
        "profile applied in fresh processes, in alternation with the loop as it was, and with the "
        "same loop at the chosen batch."
    )
    yield ""
    yield from _held_out(path)
    yield from other_runs(path, _held_out, older=True)
    commits = [run.get("commit") for run in (found, *before)]
    for later, earlier in pairwise(commits):
        yield ""
        yield BETWEEN.get(
            (earlier, later), f"What changed between {earlier} and {later} is not told here."
        )


def _held_out(path: Path) -> Iterator[str]:
    """One run's rows, the worst first."""
    found = head_of(path)
    yield (
        "| task | framework | chosen | tuned in | said | applied/plain loop | "
        "applied/plain loop at its batch | check |"
    )
    yield "|---" * 8 + "|"
    for r in found["rows"]:
        if "failed" in r:
            yield f"| {r['task']} | {r['framework']} | failed: {r['failed']} |" + " - |" * 5
    ran = [r for r in found["rows"] if "failed" not in r]
    for r in sorted(ran, key=lambda r: float(r["applied_over_plain"]["ratio"])):
        yield (
            f"| {r['task']} | {r['framework']} | {words(r['recipe'])} | {r['seconds']:.0f} s | "
            f"{ratio_text(r['said'])} | {ratio_text(r['applied_over_plain'])} | "
            f"{ratio_text(r['applied_over_plain_at_its_batch'])} | {r['verdict']} |"
        )
    ratios = [r["applied_over_plain"]["ratio"] for r in ran]
    if ratios:
        yield ""
        yield f"In the geometric mean {times(mean(ratios))}, at worst {times(min(ratios))}."
    names = {row["task"] for row in found["rows"]}
    left = sorted({path.stem for path in HOLDOUT.glob("*.py")} - names)
    if left:
        yield ""
        yield f"Not run to the end here: {', '.join(left)}."
