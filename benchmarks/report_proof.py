"""The report's tables of numerics and faults: the zoo, islands, the soak, the fuzzers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from oracle_rows import ratio_text
from reading import where


def numerics(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    scope = f"{found['tasks']} tasks, {len(found['seeds'])} seeds"
    note = f" Note: {found['note']}." if "note" in found else ""
    yield f"{found['date']}, {found['machine']}, {scope}.{note}"
    yield ""
    yield "| policy | broken caught | healthy flagged |"
    yield "|---|---|---|"
    for policy, r in found["confusion"]["table"].items():
        caught, flagged = r["broken_caught"], r["healthy_flagged"]
        yield f"| {policy} | {share_of(caught)} | {share_of(flagged)} |"
    yield ""
    yield "Aimed at: 97 % caught, 2 % flagged. What was judged wrong is listed in the data."
    for unseen in found.get("unseen", ()):
        caught, flagged = unseen["table"]["both"].values()
        yield ""
        yield f"Unseen: {share_of(caught)} caught, {share_of(flagged)} flagged: {unseen['note']}."
    cost = found["confusion"]["proof_over_200_float32_steps"]
    proofs = sum(count for _, count in found["confusion"]["table"]["both"].values())
    yield ""
    yield (
        f"A proof takes {cost['median']:.2f} times 200 float32 steps in the median, at most "
        f"{cost['largest']:.2f} times (the median over a pair's seeds); of {proofs} single proofs "
        f"{len(cost['above_one'])} took more than once: "
        f"{', '.join(cost['above_one']) or 'none'}."
    )
    yield ""
    skipped = found["scales"]["skipped"]
    yield (
        f"Skipped steps in 100 over {len(found['scales']['tasks'])} float16-healthy tasks: "
        + ", ".join(f"{name}: {count}" for name, count in skipped.items())
        + "."
    )
    islands = [r for r in found["islands"].values() if r["mendable"]]
    mended = [r for r in islands if r["mended"]]
    products = sum(r["products"] for r in mended) / len(mended)
    yield ""
    yield (
        f"Islands: {len(mended)} of {len(islands)} broken pairs mended, "
        f"{sum(r['minimal'] for r in mended)} with a minimal set, at most "
        f"{max(r['trials'] for r in mended)} trials, {products:.1%} of the matrix-product work "
        "left in float32 in the mean (aimed at: 10 %)."
    )


def islands(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    yield (
        f"{where(found)}, torch {found['torch']}. Models large enough to gain from "
        "bfloat16 and broken by it: what they gain with the islands that the tuner found."
    )
    yield ""
    yield "| task | islands | products in float32 | with islands | plain (wrong) | gain kept |"
    yield "|---|---|---|---|---|---|"
    for r in found["rows"]:
        share, names = r["share_of_products"], ", ".join(r["islands"]) or "none"
        yield (
            f"| {r['task']} | {names} | {'-' if share is None else f'{share:.1%}'} | "
            f"{ratio_text(r['mended_over_float32'])} | "
            f"{ratio_text(r['plain_over_float32'])} | {r['speed_up_kept']:.0%} |"
        )


def share_of(pair: list[int]) -> str:
    return f"{pair[0]} of {pair[1]} ({pair[0] / pair[1]:.1%})"


def soak(path: Path) -> Iterator[str]:
    """Every framework's counts, and what was not survived, as it was printed."""
    found = json.loads(path.read_text())
    soaks = found["soaks"]
    checked = all("missing" in kind for row in soaks for kind in row["faults"].values())
    if not checked:
        yield (
            "This run looked for trials that ran again, not for those missing at the end, and not "
            "for processes left when a tuning had ended by itself."
        )
        yield ""
    names = {
        "faults": "injected",
        "survived": "survived",
        "trials run again": "trials_lost",
        "trials missing": "missing",
        "half-written files": "half_written",
        "processes left": "survivors",
    }
    yield f"| framework | seed | {' | '.join(names)} |"
    yield "|---" * (len(names) + 2) + "|"
    for row in soaks:
        sums = [_sum_of(row["faults"], name) for name in names.values()]
        seed = row.get("seed", found.get("seed", "-"))
        yield f"| {row['framework']} | {seed} | {' | '.join(sums)} |"
    problems = [(row["framework"], text) for row in soaks for text in row["problems"]]
    for framework, text in problems:
        yield ""
        yield f"Not survived, {framework}: {text.split(':')[0]}."


def _sum_of(faults: Mapping[str, Mapping[str, int]], name: str) -> str:
    """A count summed over the kinds of fault; runs of before it was counted have none."""
    if any(name not in kind for kind in faults.values()):
        return "not looked for"
    return str(sum(kind[name] for kind in faults.values()))


def fuzz(path: Path) -> Iterator[str]:
    """What the loaders did with mutated files."""
    found = json.loads(path.read_text())
    yield f"{found['date']}, commit {found['commit']}, seed {found['seed']}."
    yield ""
    yield "| files | inputs | accepted | failures | slowest | most memory |"
    yield "|---|---|---|---|---|---|"
    for r in found["rows"]:
        yield (
            f"| {r['name']} | {r['inputs']} | {r['accepted']} | {len(r['failures'])} | "
            f"{1e3 * r['slowest_seconds']:.0f} ms | {r['most_bytes'] / 1e6:.1f} MB |"
        )
