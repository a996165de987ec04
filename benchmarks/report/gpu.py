"""The report's tables of what `make gpu-evidence` left: speed by small task, and the rest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.core.dtypes import Policy
from autoprec.core.number_words import times
from benchmarks.report.real_gpu import is_real
from benchmarks.search.oracle_rows import ratio_text, words

Rows = Sequence[Mapping[str, Any]]
Found = Mapping[str, Mapping[str, Rows]]

NAMES = {
    Policy.FLOAT32: "float32",
    Policy.TF32: "TF32",
    Policy.MIXED_BFLOAT16: "bfloat16",
    Policy.MIXED_FLOAT16: "float16, tuned scale",
}


def read(folder: Path) -> Found:
    """The newest rows of each piece by device; `SystemExit` where a file is no evidence."""
    found: dict[str, dict[str, Rows]] = {}
    for path in sorted(folder.glob("gpu_*.jsonl")):  # by piece and date
        rows = rows_of(path)
        why = next((row["no_evidence"] for row in rows if "no_evidence" in row), None)
        if why is not None:
            raise SystemExit(f"{path}: {why} given, expected a GPU's evidence: remove the file")
        found.setdefault(rows[0]["device"], {})[rows[0]["piece"]] = rows
    return found


def rows_of(path: Path) -> Rows:
    """The rows of a file; `SystemExit` where it is not what `benchmarks.gpu.evidence` writes."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not rows or not all({"device", "piece", "date", "commit"} <= row.keys() for row in rows):
            raise ValueError("a line lacks its device, piece, date or commit")
    except (ValueError, AttributeError) as error:
        raise SystemExit(
            f"{path}: {error}; expected lines as make gpu-evidence writes them: measure it again"
        ) from error
    return rows


def speed(found: Found) -> Iterator[str]:
    """A row for each GPU and task; one that says so where no GPU was measured."""
    columns = [
        "GPU",
        "task",
        *NAMES.values(),
        "`autoprec tune` chose",
        "over float32 as it was run",
        "over float32 at its batch",
    ]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    if not found:
        yield "| any | not measured: `make gpu-evidence` does it" + " | -" * 7 + " |"
    for device, pieces in found.items():
        for task in small_tasks(pieces):
            rows = pieces.get(f"grid-{task}", ())
            ran = [f"{cell(rows, policy)}" for policy in NAMES]
            cells = [device, task, *ran, *chosen(pieces.get(f"tune-{task}", ()))]
            yield f"| {' | '.join(cells)} |"


def small_tasks(pieces: Mapping[str, Rows]) -> Iterator[str]:
    """The tasks of these pieces that are not of real size, which have no grids but other tables."""
    named = dict.fromkeys(name.partition("-")[::2] for name in pieces)
    tasks = (
        task for kind, task in named if kind == "grid" or (kind == "tune" and not is_real(task))
    )
    yield from dict.fromkeys(tasks)


def cell(rows: Rows, policy: Policy) -> str:
    """A policy's speed over plain float32 at the same batch, as it is and compiled."""
    said = []
    for compiled in (False, True):
        for row in rows:
            recipe = row.get("recipe", {})
            if (recipe.get("policy"), recipe.get("compile")) == (policy.value, compiled):
                over = row.get("over_float32")
                ratio = times(over["ratio"]) if over else "failed"
                said.append(f"compiled {ratio}" if compiled else ratio)
    return ", ".join(said) or "-"


def chosen(rows: Rows) -> tuple[str, str, str]:
    """What a tuning chose, and what it brings: with its batch, and without."""
    if not rows or "recipe" not in rows[0]:
        return ("failed" if rows else "-"), "-", "-"
    whole, alike = gains(rows[0]["evidence"])
    return words(rows[0]["recipe"]), ratio(whole), ratio(alike)


def gains(evidence: Mapping[str, Any]) -> tuple[Mapping[str, float] | None, ...]:
    """A recorded tuning's ratio to the baseline, and to float32 at the same batch, if known."""
    if "throughput" not in evidence:  # recorded when profiles had schema 1 or 2
        return evidence["speedup"], evidence["speedup_same_batch"]
    return evidence["throughput"] or evidence["speedup"], evidence["speedup"]


def ratio(over: Mapping[str, float] | None) -> str:
    """A ratio with its interval, as far as it was measured."""
    return ratio_text(over) if over else "-"


def section(found: Found) -> Iterator[str]:
    """Everything: the speed table, then what each piece saw."""
    yield from speed(found)
    for device, pieces in found.items():
        first = next(iter(pieces.values()))[0]
        yield ""
        yield f"{device}, torch {first.get('torch', 'unknown')}:"
        yield ""
        for piece, rows in pieces.items():
            said = "; ".join(_SUMMARIES.get(piece, _nothing)(rows))
            failed = rows[0].get("failed_piece")
            words = [said, f"failed: {failed}" if failed else ""]
            yield (
                f"- {piece} ({rows[0]['date']}, commit {rows[0]['commit'][:7]}): "
                f"{'; '.join(filter(None, words)) or 'in the data'}"
            )


def _nothing(rows: Rows) -> Iterator[str]:
    yield from ()


def _tests(rows: Rows) -> Iterator[str]:
    counted = Counter(row["outcome"] for row in rows if "outcome" in row)
    yield from (f"{count} {outcome}" for outcome, count in counted.items())


def _products(rows: Rows) -> Iterator[str]:
    for row in rows:
        if row.get("measured_gflops"):
            yield f"{row['dtype']} {row['measured_gflops'] / 1e3:.1f} TFLOPS"
        if row.get("memory_bandwidth_gbps"):
            yield f"memory {row['memory_bandwidth_gbps']:.0f} GB/s"


def _overhead(rows: Rows) -> Iterator[str]:
    for row in rows:
        if "ratio" in row:
            yield (
                f"{row['policy']} {ratio_text(row, 4)} of a step of "
                f"{row['step_milliseconds']:.1f} ms"
            )


def _numerics(rows: Rows) -> Iterator[str]:
    judged = [row for row in rows if "verdict" in row]
    for policy in dict.fromkeys(row["policy"] for row in judged):
        for truth, word in (("broken", "caught"), ("healthy", "flagged")):
            own = [r for r in judged if (r["policy"], truth_of(r)) == (policy, truth)]
            count = sum(row["verdict"] != "equal" for row in own)
            yield f"{policy}: {count} of {len(own)} {truth} {word}"
    for row in rows:
        if "failed" in row:
            yield f"{row['task']} does not run: {row['failed']}"
        if "of" in row:
            yield (
                f"{row['tasks']} of {row['of']} tasks reached; the truth is a CPU's, and the GPU's "
                "own where the verdict contradicts that"
            )


def truth_of(row: Mapping[str, Any]) -> str:
    """What becomes of a task: on the GPU where that was measured, else on a CPU."""
    return str(row.get("truth_here", row["truth"]))


_SUMMARIES = {"tests": _tests, "products": _products, "overhead": _overhead, "numerics": _numerics}
