"""The report's tables of numerics and faults: the zoo, islands, the soak, the fuzzers."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS, ROOT
from benchmarks.numerics.late_breaks import table as late_breaks_table
from benchmarks.numerics.proof_costs import paired
from benchmarks.numerics.watched import table as watched_table
from benchmarks.numerics.zoo_tables import constants_table, counted, share
from benchmarks.profiles import newcomer_rows
from benchmarks.report.latest import head_of, machine_name, other_runs, where
from benchmarks.search.oracle_rows import ratio_text


def numerics(path: Path) -> Iterator[str]:
    """Who is caught and flagged, folder by folder, and what is wrong, task by task."""
    found = json.loads(path.read_text())
    if "cost_by_zoo" not in found["confusion"]:
        yield from _numerics_until_november_22(found)
        return
    versions = ", ".join(f"{name} {version}" for name, version in found["software"].items())
    place = f"{found['machine']}; {versions}; commit {found['commit']}"
    if "family" in found:
        place = f"{machine_name(found['family'])}, {place}"
    yield f"{found['date']}, {found['tasks']} tasks; {place}."
    yield ""
    yield "| tasks | seeds | policy | broken caught | healthy flagged |"
    yield "|---|---|---|---|---|"
    for zoo, counts in found["confusion"]["by_zoo"].items():
        for policy, row in counts.items():
            caught, flagged = share(row["broken_caught"]), share(row["healthy_flagged"])
            yield f"| {zoo} | {len(found['seeds'][zoo])} | {policy} | {caught} | {flagged} |"
    yield ""
    yield "What a check takes, in float32 steps (of a pair, the median over its seeds):"
    yield ""
    yield "| tasks | median | where the verdict is right | at most |"
    yield "|---|---|---|---|"
    for zoo, cost in found["confusion"]["cost_by_zoo"].items():
        steps = (200 * cost[name] for name in ("median", "median_where_right", "largest"))
        yield f"| {zoo} | {' | '.join(f'{each:.0f}' for each in steps)} |"
    yield ""
    yield "Judged wrong:"
    yield ""
    for said, seeds in _wrong(found["confusion"]["wrong"]).items():
        yield f"- {said} (seeds {', '.join(seeds)})"
    yield ""
    yield from _unclear(found["confusion"], torch="torch" in found["software"])
    if "scales" in found:
        yield ""
        yield _skips(found["scales"])


def constants(path: Path) -> Iterator[str]:
    """What a constant in the loss does to the verdicts, now and before losses had an origin."""
    found = json.loads(path.read_text())
    yield f"{where(found)}, the zoo's tasks of both frameworks, seed {found['seed']}."
    yield ""
    yield from constants_table(found)
    earlier = path.with_name(f"{path.stem}-earlier{path.suffix}")
    if earlier.exists():
        before = json.loads(earlier.read_text())
        yield ""
        yield (
            f"At commit {before['commit']} (`{earlier.name}`), where shares were of the loss as "
            "it is:"
        )
        yield ""
        yield from constants_table(before)


def proof_costs(path: Path) -> Iterator[str]:
    """The steps of a proof by zoo and verdict, and who is caught, beside an earlier commit's."""
    found = json.loads(path.read_text())
    earlier = path.with_name(f"{path.stem}-earlier{path.suffix}")
    before = json.loads(earlier.read_text())
    pairs = paired(before["rows"], found["rows"])
    yield (
        f"{where(found)}, seed {found['seed']}. A step is a forward and a backward pass, also of "
        f"what sets the pace and the loss scale. Before: commit {before['commit']} "
        f"(`{earlier.name}`)."
    )
    yield ""
    yield "| tasks | policy | verdict | checks | steps, median | before |"
    yield "|---|---|---|---|---|---|"
    kinds = dict.fromkeys((now["zoo"], now["policy"], now["verdict"]) for _, now in pairs)
    for kind in sorted(kinds):
        own = [pair for pair in pairs if kind == tuple(pair[1][n] for n in KIND)]
        was, steps = (statistics.median(pair[at]["cost"] for pair in own) for at in (0, 1))
        yield f"| {' | '.join(kind)} | {len(own)} | {steps:.0f} | {was:.0f} |"
    yield ""
    yield "| commit | broken caught | healthy flagged | steps of a check, median |"
    yield "|---|---|---|---|"
    for at, commit in enumerate((before["commit"], found["commit"])):
        rows = [pair[at] for pair in pairs]
        counts, steps = counted(rows, "both"), statistics.median(row["cost"] for row in rows)
        caught, flagged = share(counts["broken_caught"]), share(counts["healthy_flagged"])
        yield f"| {commit} | {caught} | {flagged} | {steps:.0f} |"
    yield ""
    yield f"Judged otherwise than before: {_differing(pairs)}."
    yield ""
    yield from _caught_by_zoo(found["rows"])
    if "note" in found:
        yield ""
        yield found["note"]
    smaller = path.with_name(f"{path.stem}-smaller{path.suffix}")
    if smaller.exists():
        less = json.loads(smaller.read_text())
        yield ""
        yield (
            f"With single steps at batch {less['batch']} and trainings at batch {less['trained']} "
            f"(`{smaller.name}`) judged otherwise than with both at batch {found['batch']}: "
            f"{_differing(paired(found['rows'], less['rows']))}."
        )


def _caught_by_zoo(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Who is caught and flagged of all tasks, folder by folder, and what is judged wrong."""
    yield "| tasks | checks | broken caught | healthy flagged | steps, median |"
    yield "|---|---|---|---|---|"
    for zoo in sorted({row["zoo"] for row in rows}):
        own = [row for row in rows if row["zoo"] == zoo]
        counts, steps = counted(own, "both"), statistics.median(row["cost"] for row in own)
        caught, flagged = share(counts["broken_caught"]), share(counts["healthy_flagged"])
        yield f"| {zoo} | {len(own)} | {caught} | {flagged} | {steps:.0f} |"
    wrong = [
        f"{row['zoo']} {row['task']} in {row['policy']} ({row['verdict']}, in truth {row['truth']})"
        for row in rows
        if row["truth"] != "unclear" and (row["verdict"] == "equal") == (row["truth"] == "broken")
    ]
    yield ""
    yield f"Judged wrong: {'; '.join(wrong) or 'none'}."


def watched(path: Path) -> Iterator[str]:
    """The alarms of checks during training, of healthy trainings and of broken ones."""
    found = json.loads(path.read_text())
    yield (
        f"{where(found)}, seed {found['seed']}: {found['updates']} updates each, every "
        f"{found['every']}th checked. An alarm is a fault in two checks in a row, or one that "
        "noise cannot excuse."
    )
    yield ""
    lines = list(watched_table(found["rows"]))
    yield from (line for line in lines if line.startswith("|"))
    yield ""
    yield from (f"- {line.strip()}" for line in lines if not line.startswith("|"))
    if "note" in found:
        yield f"- {found['note']}"


def late_breaks(path: Path) -> Iterator[str]:
    """What breaks late, when checks during training told it, and what they rescued."""
    found = json.loads(path.read_text())
    yield (
        f"{where(found)}: {found['updates']} updates each, checked at the first, the "
        f"{found.get('doubled', 100)}th and twice that again and again, and where there is doubt. "
        "Rescued is what ends no further above float32 than three "
        "times as far as small noise on the first weights takes it, or than 2 %. What was lost "
        "before the alarm no mend brings back: it shows in where plain float32 ends that begins "
        "with the weights and the optimizer's state at the alarm."
    )
    yield ""
    lines = list(late_breaks_table(found["rows"]))
    yield from (line for line in lines if line.startswith("|"))
    yield ""
    yield from (f"- {line}" for line in lines if not line.startswith("|"))
    if "note" in found:
        yield f"- {found['note']}"


KIND = ("zoo", "policy", "verdict")


def _differing(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """How many verdicts differ, of how many, and which."""
    named = [
        f"{now['task']} in {now['policy']} ({before['verdict']}, {now['verdict']}; in truth "
        f"{now['truth']})"
        for before, now in pairs
        if before["verdict"] != now["verdict"]
    ]
    return f"{len(named)} of {len(pairs)}" + (f": {', '.join(named)}" if named else "")


def _wrong(lines: Sequence[str]) -> dict[str, list[str]]:
    """The seeds of each pair that was judged wrong, with what it is in truth."""
    pairs: dict[str, list[str]] = {}
    for line in lines:
        zoo, task, policy, _, seed, verdict = [*line.partition(": ")[0].split(), line]
        truth = re.search(r"truth (\w+) \(([^)]*)\)", verdict)
        label = f"{truth[1]} ({truth[2]})" if truth else ""
        pairs.setdefault(f"{zoo} {task} {policy}, in truth {label}", []).append(seed)
    return pairs


def _unclear(confusion: Mapping[str, Any], torch: bool) -> Iterator[str]:
    """The pairs that are in no table, as long runs left open what becomes of them."""
    pairs = confusion.get("unclear")
    if pairs is None:
        pairs = [pair for zoo in confusion["by_zoo"] for pair in _unclear_today(zoo)]
        yield "Pairs whose truth is unclear are not in the table; this run did not list them."
        if torch:
            yield "In `zoo` and all of float16 the truth was of the tuner's own tracer or scale."
        yield "By the loops that each folder's truth.json is made of today they are:"
    else:
        yield "Not in the table, as long runs left open what becomes of them:"
    yield ""
    yield from (f"- {pair}" for pair in pairs or ["none"])


def _unclear_today(zoo: str) -> Iterator[str]:
    """The pairs of a folder whose truth is unclear, with what was found."""
    path = ROOT / "tests" / zoo / "truth.json"
    tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"] if path.exists() else {}
    for task, truth in sorted(tasks.items()):
        for policy in ("bfloat16", "float16"):
            if truth[policy]["label"] == "unclear":
                yield f"{zoo} {task} {policy}: {truth[policy]['why']}"


def _skips(scales: Mapping[str, Any]) -> str:
    """How many steps each initial loss scale throws away."""
    counts = ", ".join(f"{name}: {count}" for name, count in scales["skipped"].items())
    return f"Skipped steps in 100 over {len(scales['tasks'])} float16-healthy tasks: {counts}."


def _numerics_until_november_22(found: Mapping[str, Any]) -> Iterator[str]:
    """The first form: one folder, and the islands found for its broken pairs."""
    scope = f"{found['tasks']} tasks, {len(found['seeds'])} seeds"
    yield f"{found['date']}, {found['machine']}, {scope}, with the check of that time."
    yield ""
    yield "| policy | broken caught | healthy flagged |"
    yield "|---|---|---|"
    for policy, r in found["confusion"]["table"].items():
        caught, flagged = r["broken_caught"], r["healthy_flagged"]
        yield f"| {policy} | {share(caught)} | {share(flagged)} |"
    for unseen in found.get("unseen", ()):
        caught, flagged = unseen["table"]["both"].values()
        yield ""
        yield f"Unseen: {share(caught)} caught, {share(flagged)} flagged: {unseen['note']}."
    cost = found["confusion"]["proof_over_200_float32_steps"]
    yield ""
    yield (
        f"A check took {200 * cost['median']:.0f} float32 steps in the median, at most "
        f"{200 * cost['largest']:.0f} (the median over a pair's seeds)."
    )
    yield ""
    yield _skips(found["scales"])
    islands = [r for r in found["islands"].values() if r["mendable"]]
    repaired = [r for r in islands if r["mended"]]
    yield ""
    yield (
        f"Islands: {len(repaired)} of {len(islands)} broken pairs repaired, "
        f"{sum(r['minimal'] for r in repaired)} with a minimal set, at most "
        f"{max(r['trials'] for r in repaired)} trials."
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


def soak(path: Path) -> Iterator[str]:
    """Every framework's counts, and what was not survived; then those of all other runs."""
    found = json.loads(path.read_text())
    yield f"{found['created'][:10]}, commit {found.get('commit', 'not kept')}."
    yield ""
    yield from _soaked(path)
    yield from other_runs(path, _soaked, older=True)


def _soaked(path: Path) -> Iterator[str]:
    """One run's counts, and what was not survived, as it was printed."""
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
    yield f"| framework | seed | {' | '.join(names)} | measured again on purpose | problems |"
    yield "|---" * (len(names) + 4) + "|"
    for row in soaks:
        sums = [_sum_of(row["faults"], name) for name in names.values()]
        seed = row.get("seed", found.get("seed", "-"))
        sums += [str(row.get("remeasured", "not counted")), str(len(row["problems"]))]
        yield f"| {row['framework']} | {seed} | {' | '.join(sums)} |"
    for row in soaks:
        for problem in row["problems"]:
            yield ""
            yield f"Not survived, {_named(row)}: {_problem(problem)}."
    uncounted = [row for row in soaks if row["problems"] and "remeasured" not in row]
    if uncounted:
        yield ""
        yield (
            "This run did not tell lost trials from those that a resumed tuning measures again on "
            "purpose, as where the machine's speed has changed. Which these were is not known."
        )


def _named(row: Mapping[str, Any]) -> str:
    """A framework and, where there are several, its seed."""
    return f"{row['framework']}, seed {row['seed']}" if "seed" in row else str(row["framework"])


def _problem(text: str) -> str:
    """What was wrong, without what the tuning had printed and without a guess at the cause."""
    label, _, said = text.partition(": ")
    listed = re.match(r"(?:again )?\[('.*?')\]", said)
    if listed is None:
        return label
    again = len(re.findall(r"'[^']*'", listed[1]))
    return f"{'' if label == 'run again' else f'{label}, '}{again} trials ran again"


def _sum_of(faults: Mapping[str, Mapping[str, int]], name: str) -> str:
    """A count summed over the kinds of fault; runs of before it was counted have none."""
    if any(name not in kind for kind in faults.values()):
        return "not looked for"
    return str(sum(kind[name] for kind in faults.values()))


def fuzz(path: Path) -> Iterator[str]:
    """What the loaders did with mutated files."""
    found = json.loads(path.read_text())
    yield (
        f"{found['date']}, commit {found['commit']}, seed {found['seed']}. How many inputs a run "
        "has is an argument; `make fuzz` loads 100,000 profiles and 10,000 catalogue files."
    )
    yield ""
    yield "| files | inputs | accepted | failures | most calls | most memory |"
    yield "|---|---|---|---|---|---|"
    for r in found["rows"]:
        yield (
            f"| {r['name']} | {r['inputs']} | {r['accepted']} | {len(r['failures'])} | "
            f"{r['most_calls']} | {r['most_bytes'] / 1e6:.1f} MB |"
        )


def newcomer(folder: Path = RESULTS) -> Iterator[str]:
    """How well the examples' scripts train with profiles, and without: the newest run."""
    path = max(folder.glob("newcomer-*.json"), default=None)
    if path is None:
        yield "No result yet: `python -m benchmarks.profiles.newcomer` prints it."
        return
    found = head_of(path)
    yield f"{where(found)}, torch {found['torch']}, data: `benchmarks/results/{path.name}`."
    yield ""
    yield from newcomer_rows.HEAD
    yield from map(newcomer_rows.in_a_line, found["rows"])
