"""The peers' tables: three ratios for each rival, and their geometric means.

Rows of before there were three hold one ratio, of rivals that were not helped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.search.oracle_rows import NOT_MEASURED, Row, mean, ratio_text, words

OURS = "autoprec"
ALIKE = "float32 alike"
BEST = "best rival"
CHOSEN, AT_BATCH, KNOBS = "chosen", "fixed", "knobs"
COMPARISONS = {CHOSEN: "as chosen", AT_BATCH: "batch fixed", KNOBS: "knobs apart"}

HELPED = (
    "Each rival's freed memory is kept from its process's start, and where autoprec tries them and "
    "the rival does not choose, the faster of the layouts and of plain or fused optimizers is "
    "taken for it; everybody had the same seconds to search in. Three ratios, autoprec's "
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


def means(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By comparison: the geometric mean of autoprec over each peer, and over each task's best.

    A peer is left out of the tasks in which it chose nothing, or what does not train.
    """
    found: dict[str, dict[str, float]] = {}
    for name in COMPARISONS:
        by_peer: dict[str, list[float]] = {}
        best = []
        for row in rows:
            sides = comparisons(row).get(name, {})
            ratios = {p: s["ours_over"]["ratio"] for p, s in sides.items() if "ours_over" in s}
            for peer, ratio in ratios.items():
                by_peer.setdefault(peer, []).append(ratio)
            rivals = [ratio for peer, ratio in ratios.items() if peer != ALIKE]
            best += [min(rivals)] if rivals else []
        if by_peer:
            found[name] = {peer: mean(ratios) for peer, ratios in by_peer.items()}
        if best:
            found[name][BEST] = mean(best)
    return found


def peer_table(rows: Sequence[Row]) -> Iterator[str]:
    """A row for each task and rival, then the geometric means of all three ratios."""
    yield HELPED if all("comparisons" in row for row in rows) else NOT_HELPED
    yield ""
    columns = ["task", "peer", "chose", "search", "peak memory", *COMPARISONS.values(), "note"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        for peer, found in row["peers"].items():
            yield f"| {' | '.join(_cells(row, peer, found))} |"
        alike = comparisons(row).get(CHOSEN, {}).get(ALIKE)
        if alike is not None:
            said = [row["task"], ALIKE, words(alike["theirs"]), "-", "-", _ratio(alike), "-", "-"]
            yield f"| {' | '.join([*said, 'autoprec without its precision'])} |"
    yield ""
    if lost := [row["task"] for row in rows if "recipe" not in row["peers"][OURS]]:
        yield f"autoprec itself chose nothing on {', '.join(lost)}, which no mean includes."
        yield ""
    yield from _means_table(means(rows))


def _cells(row: Row, peer: str, found: Row) -> list[str]:
    sides = comparisons(row)
    dressed = sides.get(CHOSEN, {}).get(peer, {}).get("theirs", found.get("recipe"))
    seconds, memory = found.get("seconds"), found.get("peak_memory_bytes")
    ours = peer.startswith(OURS)
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
    return ratio_text(side["ours_over"], 2)


def _means_table(found: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield f"| geometric mean of autoprec over | {' | '.join(COMPARISONS.values())} |"
    yield "|---" * (1 + len(COMPARISONS)) + "|"
    for peer in dict.fromkeys(peer for values in found.values() for peer in values):
        values = [found.get(name, {}).get(peer) for name in COMPARISONS]
        if peer == ALIKE:
            said = [f"{values[0]:.2f}x", "-", "-"]
        else:
            said = [NOT_MEASURED if value is None else f"{value:.2f}x" for value in values]
        yield f"| {peer} | {' | '.join(said)} |"
