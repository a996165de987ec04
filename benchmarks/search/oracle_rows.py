"""The oracle's rows: shares of the grid's time, geometric means, and its tables' cells.

Everything is said of what a row holds; what an older row does not hold is "not measured".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autoprec.core.codec import from_plain
from autoprec.core.number_words import times
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_recipe

Row = Mapping[str, Any]

NOT_MEASURED = "not measured"

#: The stages that time recipes in alternation, with the names they have in older rows.
INTERLEAVED = ("reranking", "confirmation", "heats", "finish")

#: The stages that choose.
CHOOSING = ("search", *INTERLEAVED)


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def whole(r: Row) -> float:
    """The seconds of a whole tuning: first step, probe, search, interleaved timing, proof."""
    return float(sum(r["stages"].values()))


def interleaved_timing(stages: Mapping[str, float]) -> float:
    """The seconds of interleaved timing: the fastest recipes, the finalists, the winner."""
    return sum(stages.get(stage, 0.0) for stage in INTERLEAVED)


def proof(stages: Mapping[str, float]) -> float:
    """The seconds of proofs, the search for islands included."""
    return stages.get("proof", 0.0) + stages.get("islands", 0.0)


def share(r: Row) -> float:
    """The time of a whole tuning over that of the grid's steps."""
    return whole(r) / float(r["grid_seconds"])


def share_of_choosing(r: Row) -> float:
    """The time of trials and interleaved timing alone over that of the grid's steps."""
    seconds = sum(float(r["stages"].get(stage, 0.0)) for stage in CHOOSING)
    return max(seconds, 1e-3) / float(r["grid_seconds"])


def share_of_short(r: Row) -> float:
    """The time of a whole tuning over that of a grid whose points take as long as our trials do.

    A trial takes what the search took in the mean, its process's part included.
    """
    trial = max(float(r["stages"].get("search", 0.0)), 1e-3) / max(1, r["trials"])
    return whole(r) / (trial * r["points"])


def chosen(r: Row) -> str:
    """The whole chosen recipe in words, as the product says it."""
    return words(r["recipes"]["chosen"])


def words(plain: Any) -> str:
    """A recipe as a row holds it, in the product's words."""
    return describe_recipe(from_plain(Recipe, plain))


def over_float32(r: Row, which: str) -> str:
    """A ratio to float32 as it was run, without its interval."""
    return times(r[which]["ratio"])


def over_alike(r: Row) -> str:
    """The ratio to float32 with all else as chosen, at the chosen batch, too."""
    found = r.get("chosen_over_float32_alike")
    return NOT_MEASURED if found is None else ratio_text(found)


def ratio_text(ratio: Mapping[str, float], digits: int = 2) -> str:
    """A ratio of a row with its interval, as the product shows it; a table tells the rounds once.

    Ratios that are all near 1 take more `digits`.
    """
    return Ratio(ratio["ratio"], ratio["low"], ratio["high"], rounds=0).in_words(digits)


COLUMNS = (
    "task",
    "chosen/best",
    "chosen/float32 default",
    "chosen/float32 alike",
    "best/float32 default",
    "tuning/grid",
    "tuning/short grid",
    "trials",
    "first step",
    "search",
    "interleaved timing",
    "check",
    "chosen",
)


def cells(r: Row) -> list[str]:
    """A row's cells, one for each of `COLUMNS`."""
    stages = r["stages"]
    return [
        r["task"],
        ratio_text(r["chosen_over_best"], 3),
        over_float32(r, "chosen_over_float32"),
        over_alike(r),
        over_float32(r, "best_over_float32"),
        f"{share(r):.0%}",
        f"{share_of_short(r):.0%}",
        f"{r['trials']} of {r['points']}",
        f"{stages.get('preflight', 0.0):.0f} s",
        f"{stages.get('search', 0.0):.0f} s",
        f"{interleaved_timing(stages):.0f} s",
        f"{proof(stages):.0f} s",
        chosen(r),
    ]


def measured_twice(r: Row) -> bool:
    """Whether the grid's five fastest were measured once more before one was called the best."""
    return "fastest" in r


def worst_first(rows: Sequence[Row]) -> list[Row]:
    """The rows by chosen/best, the worst first."""
    return sorted(rows, key=lambda r: float(r["chosen_over_best"]["ratio"]))


BEST_FOUND = "best of the grid"
TWICE, ONCE = "measured twice", "measured once"


def best_found(rows: Sequence[Row]) -> str:
    """How the grid's best was found, in words; by row where the rows differ."""
    further = sorted({knob for r in rows for knob in r.get("knobs_of_the_fastest", ())})
    ways = {
        TWICE: f"the grid has {', '.join(further)}, which the tuner tries too, at the five fastest "
        "only; its best is that of the five fastest when these were measured once more",
        ONCE: "the grid has no further knobs, and the tuner was told to leave them out too; its "
        "best was measured once, so it is partly lucky, which makes chosen/best better",
    }
    if all(map(measured_twice, rows)):
        return ways[TWICE]
    if not any(map(measured_twice, rows)):
        return ways[ONCE]
    return f"where it was *{TWICE}*, {ways[TWICE]}. Where it was *{ONCE}*, {ways[ONCE]}"


def explanation(rows: Sequence[Row]) -> str:
    """What the columns say."""
    return (
        "The best of an exhaustive grid (batch, policy, layout, XLA, and for PyTorch freed memory "
        "kept or not; a fresh process for each recipe and 5 s, more where the steps are longer) "
        "against what `autoprec tune` chose, measured in alternation with 95 % intervals. *Best of "
        f"the grid*: {best_found(rows)}. *float32 default* is float32 as it was run, at its own "
        "batch; *float32 alike* has the chosen recipe's batch and all its settings, so it says "
        "what precision brings. *tuning/grid* is the whole tuning, from the first step to the last "
        "round, over the grid's steps; *short grid* is a grid whose points take as long as the "
        "tuner's trials do (estimated). No grid checks anything: the check alone is in *check*. "
        "Where 1.000 has no interval, both are the same recipe."
    )


def summary(rows: Sequence[Row]) -> str:
    """The table's last line: geometric means, and the worst of each."""
    counted = [r for r in rows if not r.get("older")]
    older = ", ".join(r["task"] for r in rows if r.get("older"))
    left_out = f" without {older}" if older else ""
    ratios = [r["chosen_over_best"]["ratio"] for r in counted]
    seeds = [abs(math.log(r["second_over_chosen"]["ratio"])) for r in counted]
    over = mean(r["chosen_over_float32"]["ratio"] for r in counted)
    best = mean(r["best_over_float32"]["ratio"] for r in counted)
    alike = [r["chosen_over_float32_alike"]["ratio"] for r in counted if _has_alike(r)]
    precision = times(mean(alike)) if len(alike) == len(counted) else NOT_MEASURED
    shares = {
        "tuning/grid": share,
        "trials and interleaved timing alone": share_of_choosing,
        "tuning/short grid": share_of_short,
    }
    said = ", ".join(f"{name} {mean(map(of, counted)):.0%}" for name, of in shares.items())
    return (
        f"Geometric means{left_out}: chosen/best {mean(ratios):.3f} (worst {min(ratios):.3f}); "
        f"chosen {times(over)} the float32 default, the best {times(best)}; chosen/float32 alike "
        f"{precision}; {said}. Two seeds choose recipes at most {max(seeds):.1%} apart. Trials "
        f"killed by the operating system: {sum(r['killed'] for r in counted)}."
    )


def _has_alike(r: Row) -> bool:
    return r.get("chosen_over_float32_alike") is not None


def table(rows: Sequence[Row], extra: Mapping[str, Sequence[str]] | None = None) -> Iterator[str]:
    """The rows as a table; `extra` columns come after the task."""
    extra = extra or {}
    columns = [COLUMNS[0], *extra, *COLUMNS[1:]]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for index, r in enumerate(rows):
        found = cells(r)
        more = [values[index] for values in extra.values()]
        yield f"| {' | '.join([found[0], *more, *found[1:]])} |"


# On a terminal ------------------------------------------------------------------------------------

HEAD = (
    "task         chosen/best (95 %)      chosen/float32  alike  best/float32  tuning/grid  short"
    "  trials     whole  seeds  chosen"
)


def row(r: Row) -> str:
    """One line of the table."""
    best = ratio_text(r["chosen_over_best"], 3)
    seeds = abs(math.log(r["second_over_chosen"]["ratio"]))
    alike = over_float32(r, "chosen_over_float32_alike") if _has_alike(r) else "-"
    return (
        f"{r['task']:12s} {best}"
        f" {over_float32(r, 'chosen_over_float32'):>14s} {alike:>6s}"
        f" {over_float32(r, 'best_over_float32'):>13s} {share(r):12.0%} {share_of_short(r):6.0%}"
        f" {r['trials']:3d} of {r['points']:3d} {whole(r):6.0f} s {seeds:6.1%}  {chosen(r)}"
    )
