"""Prints the tables of `numerics`: who is caught, which scale, which islands."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

JUDGED = ("bfloat16", "float16")


def confusion_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Who is caught and who is flagged (drift or rejected), and what a check costs."""
    wrong = [r for r in rows if (r["verdict"] != "equal") != (r["truth"] == "broken")]
    print("\n| tasks | policy | broken caught | healthy flagged |\n|---|---|---|---|")
    table = {policy: counted(rows, policy) for policy in (*JUDGED, "both")}
    zoos = {zoo: [r for r in rows if r["zoo"] == zoo] for zoo in dict.fromkeys(_zoos(rows))}
    by_zoo = {zoo: {policy: counted(own, policy) for policy in table} for zoo, own in zoos.items()}
    for zoo, counts in (by_zoo | {"all": table} if len(by_zoo) > 1 else by_zoo).items():
        for policy, row in counts.items():
            caught, flagged = share(row["broken_caught"]), share(row["healthy_flagged"])
            print(f"| {zoo} | {policy} | {caught} | {flagged} |")
    cost = _costs(rows)
    print("\nWhat a check takes, in float32 steps (of a pair, the median over its seeds)\n")
    print("| tasks | median | where the verdict is right | at most |\n|---|---|---|---|")
    costs = {zoo: _costs(own) for zoo, own in zoos.items()}
    for zoo, of in costs.items():
        steps = (200 * of[name] for name in ("median", "median_where_right", "largest"))
        print(f"| {zoo} | {' | '.join(f'{each:.0f}' for each in steps)} |")
    for steps, count in sorted(cost["followed"].items()):
        print(f"  followed for {steps} steps: {count}")
    told = [
        f"{r['zoo']} {r['task']} {r['policy']} seed {r['seed']}: {r['verdict']}, "
        f"truth {r['truth']} "
        f"({r['why']}): {r['reason']}"
        for r in wrong
    ]
    for line in told:
        print(f"  {line}")
    return {
        "table": table,
        "by_zoo": by_zoo,
        "wrong": told,
        "cost_by_zoo": costs,
        "proof_over_200_float32_steps": cost,
    }


def _zoos(rows: list[dict[str, Any]]) -> list[str]:
    return [row["zoo"] for row in rows]


def counted(rows: list[dict[str, Any]], policy: str) -> dict[str, list[int]]:
    """How many are caught of the broken, and flagged of the healthy."""
    of = [r for r in rows if policy in (r["policy"], "both")]
    return {
        name: [sum(r["verdict"] != "equal" for r in of if r["truth"] == truth), count]
        for name, truth in (("broken_caught", "broken"), ("healthy_flagged", "healthy"))
        for count in (sum(r["truth"] == truth for r in of),)
    }


def _costs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What proofs cost: by pairs, for a single time on a shared machine is off by a tenth."""
    pairs: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        pairs.setdefault((row["zoo"], row["task"], row["policy"]), []).append(row["cost"])
    medians = [statistics.median(costs) for costs in pairs.values()] or [0.0]
    right = [r for r in rows if (r["verdict"] != "equal") == (r["truth"] == "broken")]
    dear = sorted((row for row in rows if row["cost"] > 1), key=lambda row: -row["cost"])
    return {
        "median": statistics.median(medians),
        "median_where_right": statistics.median([r["cost"] for r in right] or [0.0]),
        "largest": max(medians),
        "followed": dict(Counter(row["steps"] for row in rows)),
        "above_one": [f"{r['task']} {r['policy']} {r['seed']}: {r['cost']:.2f}" for r in dear],
    }


def constants_table(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `loss_constants`: verdicts by constant, and how many depend on it."""
    yield "| constant | broken caught | healthy flagged |"
    yield "|---|---|---|"
    for name, row in found["counts"].items():
        yield f"| {name} | {share(row['broken_caught'])} | {share(row['healthy_flagged'])} |"
    yield ""
    yield f"Pairs whose verdict depends on the constant: {len(found['changed'])}."


def share(pair: list[int]) -> str:
    """Show a count and its share, with Wilson's interval of 95 %."""
    low, high = wilson(*pair)
    of = f"{pair[0]} of {pair[1]}"
    return f"{of} ({100 * pair[0] / max(1, pair[1]):.1f} %; {100 * low:.1f}-{100 * high:.1f} %)"


def wilson(count: int, of: int) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 %."""
    if not of:
        return 0.0, 1.0
    z, p = 1.96, count / of
    middle, root = p + z * z / (2 * of), math.sqrt(p * (1 - p) / of + (z / (2 * of)) ** 2)
    base = 1 + z * z / of
    return max(0.0, (middle - z * root) / base), min(1.0, (middle + z * root) / base)


def scales_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Skipped steps summed over the tasks that float16 can train."""
    skipped = {name: sum(r[name] for r in rows) for name in ("2^15", "2^16", "tuned")}
    print("\nSkipped steps in 100, summed over the tasks float16 can train\n")
    print("| tasks | at 2^15 | at 2^16 | tuned |\n|---|---|---|---|")
    print(f"| {len(rows)} | {skipped['2^15']} | {skipped['2^16']} | {skipped['tuned']} |")
    for row in rows:
        if row["2^15"] or row["2^16"] or row["tuned"]:
            print(f"  {row}")
    return {"skipped": skipped, "tasks": _named(rows, "zoo", "task")}


def islands_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many broken pairs islands mend, and at which price."""
    mended = [row for row in rows if row["mended"]]
    trials = [row["trials"] for row in mended] or [0]
    work = statistics.fmean([row["products"] for row in mended] or [0.0])
    print("\nIslands for the broken pairs\n")
    print("| broken | mendable | mended | minimal | trials median/max | work left in float32 |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {len(rows)} | {sum(r['mendable'] for r in rows)} | {len(mended)} "
        f"| {sum(r['minimal'] for r in mended)} | {statistics.median(trials):g}/{max(trials)} "
        f"| {100 * work:.1f} % |"
    )
    for row in rows:
        print(f"  {row}")
    return _named(rows, "zoo", "task", "policy")


def _named(rows: list[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """The rows by the values of `keys`, which leave them."""
    return {
        " ".join(row[key] for key in keys): {k: v for k, v in row.items() if k not in keys}
        for row in rows
    }
