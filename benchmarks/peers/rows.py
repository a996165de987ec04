"""The peers' tables: three ratios for each rival, and their geometric means.

Rows of before there were three hold one ratio, of rivals that were not helped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoprec.core.number_words import times
from benchmarks.search.oracle_rows import NOT_MEASURED, Row, mean, ratio_text, words

OWN = OURS, OURS_AT_THE_BATCH = "autoprec", "autoprec, batch fixed"
ALIKE = "float32 alike"
BEST = "best rival"
WITHOUT_LARGEST = "best rival, without its largest ratio"
CHOSEN, AT_BATCH, KNOBS = "chosen", "fixed", "knobs"
COMPARISONS = {CHOSEN: "as chosen", AT_BATCH: "batch fixed", KNOBS: "knobs apart"}

HELPED = (
    "Each rival's freed memory is kept from its process's start, and where autoprec tries them and "
    "the rival does not choose, the faster of the layouts and of plain or fused optimizers is "
    "taken for it. Three ratios, autoprec's "
    "throughput over theirs, in alternation: *as chosen*, with everybody's own policy, batch and "
    "settings; *batch fixed*, all of them at the task's own batch; *knobs apart*, the rival's "
    "policy and batch on both sides, so that autoprec's other settings are left."
)
NOT_HELPED = (
    "These rows are of before rivals were helped: they kept no freed memory, had no fused "
    "optimizer and no layout but their own, and autoprec's search had no time limit. The ratio "
    "mixes policy, batch and allocator."
)


def comparisons(row: Row) -> Mapping[str, Mapping[str, Any]]:
    """A row's comparisons; of an older row the one that it has."""
    if "comparisons" in row:
        found: Mapping[str, Mapping[str, Any]] = row["comparisons"]
        return found
    own = row["peers"][OURS].get("recipe")
    made = {
        peer: {"ours": own, "theirs": found["recipe"], "ours_over": found["ours_over"]}
        for peer, found in row["peers"].items()
        if peer != OURS and "ours_over" in found
    }
    return {CHOSEN: made}


def rivals_of(row: Row, name: str) -> dict[str, float]:
    """Autoprec's throughput over each rival's in a comparison, where it was measured."""
    sides = comparisons(row).get(name, {})
    return {
        peer: float(side["ours_over"]["ratio"])
        for peer, side in sides.items()
        if peer != ALIKE and "ours_over" in side
    }


def best_rival(row: Row, name: str = CHOSEN) -> float:
    """Autoprec's throughput over the best rival's, nan where none was measured."""
    return min(rivals_of(row, name).values(), default=math.nan)


def lost(row: Row) -> bool:
    """Whether autoprec chose nothing: a loss, however fast float32 as it was run may be."""
    return "recipe" not in row["peers"][OURS]


def worst_first(rows: Sequence[Row]) -> list[Row]:
    """The rows by autoprec over the best rival; where it chose nothing, before all others."""
    return sorted(rows, key=lambda row: -math.inf if lost(row) else best_rival(row))


def means(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By comparison: the geometric mean of autoprec over each peer, and over each task's best.

    A peer is left out of the tasks in which it chose nothing, or what does not train. Without the
    largest ratio, the last mean says how much of it is of one task.
    """
    found: dict[str, dict[str, float]] = {}
    for name in COMPARISONS:
        by_peer: dict[str, list[float]] = {}
        for row in rows:
            alike = comparisons(row).get(name, {}).get(ALIKE, {})
            ratios = rivals_of(row, name)
            if "ours_over" in alike:
                ratios[ALIKE] = alike["ours_over"]["ratio"]
            for peer, ratio in ratios.items():
                by_peer.setdefault(peer, []).append(ratio)
        best = sorted(best_rival(row, name) for row in rows if rivals_of(row, name))
        if by_peer:
            found[name] = {peer: mean(ratios) for peer, ratios in by_peer.items()}
        if best:
            found[name][BEST] = mean(best)
        if len(best) > 1:
            found[name][WITHOUT_LARGEST] = mean(best[:-1])
    return found


def peer_table(rows: Sequence[Row]) -> Iterator[str]:
    """A row for each task and rival, the worst first, then the means of all three ratios."""
    yield HELPED if all("comparisons" in row for row in rows) else NOT_HELPED
    yield ""
    yield from _limits(rows)
    columns = ["task", "peer", "chose", "search", "peak memory", *COMPARISONS.values(), "note"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in worst_first(rows):
        ratios = rivals_of(row, CHOSEN)
        for peer in sorted(row["peers"], key=lambda peer: ratios.get(peer, math.inf)):
            yield f"| {' | '.join(_cells(row, peer, row['peers'][peer]))} |"
        alike = comparisons(row).get(CHOSEN, {}).get(ALIKE)
        if alike is not None:
            said = [row["task"], ALIKE, words(alike["theirs"]), "-", "-", _ratio(alike), "-", "-"]
            yield f"| {' | '.join([*said, 'autoprec without its precision'])} |"
    yield ""
    yield said_of_means(rows)
    yield ""
    yield from _means_table(means(rows))


def _limits(rows: Sequence[Row]) -> Iterator[str]:
    """The limit of the searches, who took longer, and the rounds; older rows do not say."""
    limits = sorted({row["limit"] for row in rows if "limit" in row})
    if not limits:
        return
    over = [
        f"{row['task']}: {peer} {found['seconds']:.0f} s"
        for row in rows
        for peer, found in row["peers"].items()
        if (found.get("seconds") or 0.0) >= row["limit"] + 1
    ]
    rounds = {
        side["ours_over"]["rounds"]
        for row in rows
        for sides in comparisons(row).values()
        for side in sides.values()
        if "ours_over" in side
    }
    yield (
        f"Everybody was given {' or '.join(f'{limit:.0f}' for limit in limits)} s to search in; "
        "the column *search* has the seconds that each took. Longer than the limit: "
        f"{', '.join(over) or 'nobody'}. Ratios are of {' or '.join(map(str, sorted(rounds)))} "
        "rounds."
    )
    yield ""


def said_of_means(rows: Sequence[Row]) -> str:
    """How often the best rival won, and which tasks the means leave out, and why."""
    nothing = [row["task"] for row in rows if lost(row)]
    chose = [row for row in rows if rivals_of(row, CHOSEN) and not lost(row)]
    best = {row["task"]: min(_intervals(row), key=lambda over: over["ratio"]) for row in chose}
    faster = [task for task, over in best.items() if over["low"] > 1]
    slower = [task for task, over in best.items() if over["high"] < 1]
    unsure = [task for task in best if task not in (*faster, *slower)]
    said = (
        f"As chosen, autoprec over the best rival of each of {len(rows)} tasks: "
        f"{len(faster)} won ({', '.join(faster) or 'none'}), "
        f"{len(slower) + len(nothing)} lost ({', '.join((*slower, *nothing)) or 'none'}), "
        f"{len(unsure)} within the noise ({', '.join(unsure) or 'none'})."
    )
    if nothing:
        said += (
            f" Lost is also where autoprec chose nothing and leaves float32 as it was run: "
            f"{', '.join(nothing)}."
        )
    for row in rows:
        if not rivals_of(row, CHOSEN):
            peers = row["peers"].items()
            found = [p for p, r in peers if "recipe" in r and p not in OWN]
            why = "autoprec chose nothing" if lost(row) else "nothing was measured"
            said += (
                f" The means leave out {row['task']}, where {why} ({row['peers'][OURS]['note']}) "
                f"while {', '.join(found) or 'nobody'} chose something: they flatter by that."
            )
    return said


def _intervals(row: Row) -> list[Mapping[str, Any]]:
    """Autoprec over each rival as chosen, with the intervals."""
    sides = comparisons(row)[CHOSEN]
    return [sides[peer]["ours_over"] for peer in rivals_of(row, CHOSEN)]


def in_a_line(rows: Sequence[Row]) -> str:
    """A run in a line: autoprec over the best rival, as chosen, task by task; the worst first."""
    said = [
        f"{row['task']} {'nothing chosen' if lost(row) else f'{best_rival(row):.2f}'}"
        for row in worst_first(rows)
    ]
    helped = "" if all("comparisons" in row for row in rows) else ", rivals not helped"
    return f"autoprec over the best rival, as chosen{helped}: {', '.join(said)}."


def _cells(row: Row, peer: str, found: Row) -> list[str]:
    sides = comparisons(row)
    dressed = sides.get(CHOSEN, {}).get(peer, {}).get("theirs", found.get("recipe"))
    seconds, memory = found.get("seconds"), found.get("peak_memory_bytes")
    ours = peer in OWN
    return [
        row["task"],
        peer,
        "nothing" if dressed is None else words(dressed),
        "-" if seconds is None else f"{seconds:.0f} s",
        "-" if not memory else f"{memory / 2**30:.1f} GiB",
        *("-" if ours else _side(sides, name, peer) for name in COMPARISONS),
        str(found["note"]).replace("|", "/"),
    ]


def _side(sides: Mapping[str, Mapping[str, Any]], name: str, peer: str) -> str:
    """A cell: the ratio, why there is none, or that it was not measured."""
    if name not in sides:
        return NOT_MEASURED
    return _ratio(sides[name][peer]) if peer in sides[name] else "-"


def _ratio(side: Mapping[str, Any]) -> str:
    if "ours_over" not in side:
        return str(side.get("failed", "-")).replace("|", "/")
    return ratio_text(side["ours_over"])


def _means_table(found: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield f"| geometric mean of autoprec over | {' | '.join(COMPARISONS.values())} |"
    yield "|---" * (1 + len(COMPARISONS)) + "|"
    for peer in dict.fromkeys(peer for values in found.values() for peer in values):
        values = [found.get(name, {}).get(peer) for name in COMPARISONS]
        if peer == ALIKE:
            said = [times(values[0]), "-", "-"]
        else:
            said = [NOT_MEASURED if value is None else times(value) for value in values]
        yield f"| {peer} | {' | '.join(said)} |"
