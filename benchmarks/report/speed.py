"""The report's tables of speed: a step's overhead, start-up, memory, compiling, replays, growth."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.core.number_words import times
from benchmarks.overhead.fit import BROKEN, KEPT, PROMISED_FROM, UNRESOLVED, judged
from benchmarks.provenance import staleness_in_words
from benchmarks.report.latest import head_of, other_runs, where
from benchmarks.search.oracle_rows import (
    NOT_MEASURED,
    interleaved_timing,
    mean,
    proof,
    ratio_text,
    words,
)


def overhead(path: Path) -> Iterator[str]:
    """What a step costs, and the fixed part of it where that was fitted."""
    found = json.loads(path.read_text())
    yield staleness_in_words("overhead", found)
    yield ""
    if isinstance(found, list):
        yield (
            f"{where(head_of(path))}. One process a case; the fixed cost was not fitted, and the "
            "upper ends of the intervals were not what was promised."
        )
        yield ""
        yield "| policy | step by hand | with apply_profile | cost |"
        yield "|---|---|---|---|"
        for r in found:
            yield (
                f"| {r['policy']} | {r['step_milliseconds']:.2f} ms | {ratio_text(r, 4)} | "
                f"{r['overhead_microseconds']:+.0f} us |"
            )
        return
    yield (
        f"{where(found)}. {found['processes']} processes a case; the intervals are over processes. "
        "The fixed cost is that of a line through the costs at all steps of a process, each "
        "weighted by its step; promised are upper ends. Where the promised number lies inside the "
        "interval, nothing is resolved."
    )
    for way, commit in {r["way"]: r["commit"] for r in found["cases"] if "commit" in r}.items():
        yield f"{way}: {staleness_in_words('overhead', {'commit': commit})}"
    yield ""
    yield "| way | policy | step by hand | with apply_profile | cost | kept |"
    yield "|---|---|---|---|---|---|"
    for r in found["cases"]:
        yield (
            f"| {r['way']} | {r['policy']} | {r['step_milliseconds']:.2f} ms | "
            f"{ratio_text(r['ratio'], 4)} | {microseconds(r['cost'])} | {judged(r)} |"
        )
    yield from _not_shown(found)
    yield ""
    yield (
        "The fixed cost is where the line meets a step of no length, and alone it understates what "
        "a step costs: in PyTorch the cost also grows with the step, as the last two columns say. "
        "*Growth* is between the shortest step and the longest one for which nothing is promised."
    )
    yield ""
    yield (
        "| way | policy | fixed cost of a step | promised | kept | at the shortest step | growth |"
    )
    yield "|---" * 7 + "|"
    for r in found["fixed"]:
        promised = r["promised_microseconds"]
        said = "nothing" if promised is None else f"at most {promised:.0f} us"
        cases = [c for c in found["cases"] if (c["way"], c["policy"]) == (r["way"], r["policy"])]
        cells = [r["way"], r["policy"], microseconds(r["fixed"]), said, judged(r)]
        yield f"| {' | '.join([*cells, *short_steps(cases)])} |"
    yield from other_runs(path, _fixed_costs, older=True)


def _fixed_costs(path: Path) -> Iterator[str]:
    """A run's fixed costs, and how many promises it showed to be kept, in a line."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(found, list):
        yield "The fixed cost was not fitted."
        return
    states = Counter(judged(r) for r in found["cases"])
    fixed = [f"{r['way']}, {r['policy']} {microseconds(r['fixed'])}" for r in found["fixed"]]
    yield (
        f"Of the promises about a step's ratio {states[KEPT]} kept, {states[BROKEN]} broken, "
        f"{states[UNRESOLVED]} unresolved; fixed costs: {'; '.join(fixed)}."
    )


def short_steps(cases: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """What the shortest step costs, and by how much of a step that grows where steps are short."""
    ordered = sorted(cases, key=lambda case: float(case["step_milliseconds"]))
    first = ordered[0]
    shown = f"{microseconds(first['cost'])} of {first['step_milliseconds']:.2f} ms"
    short = [c for c in ordered if c["step_milliseconds"] < 1e3 * PROMISED_FROM]
    if len(short) < 2 or any(case["cost"]["low"] <= 0 for case in short):
        return shown, NOT_MEASURED if len(short) < 2 else UNRESOLVED
    longer = 1e-3 * (short[-1]["step_milliseconds"] - first["step_milliseconds"])
    return shown, f"{(short[-1]['cost']['middle'] - first['cost']['middle']) / longer:.1%}"


def _not_shown(found: Mapping[str, Any]) -> Iterator[str]:
    """Of the promises about long steps and fixed costs, which were broken or not shown, and why."""
    broken = [r for r in found["cases"] if judged(r) == BROKEN]
    unresolved = [r for r in found["cases"] if judged(r) == UNRESOLVED]
    above = [r for r in unresolved if r["ratio"]["ratio"] > r["promised_ratio"]]
    kept = sum(judged(r) == KEPT for r in found["cases"])
    promised = kept + len(broken) + len(unresolved)
    if kept == promised:
        return
    yield ""
    yield (
        f"Of {promised} promises about a step's ratio {kept} are shown to be kept, {len(broken)} "
        f"are broken, and {len(unresolved)} are unresolved: there the interval reaches from below "
        "the promised number to above it. What is known of these is that interval: the "
        f"{found['processes']} processes differ from each other by more than is promised. What is "
        "not known is why they do, and whether the promise is kept."
    )
    for name, rows in (("Broken", broken), ("The median itself is above the promise", above)):
        if rows:
            listed = "; ".join(
                f"{r['way']}, {r['policy']}, {r['step_milliseconds']:.2f} ms "
                f"({r['ratio']['ratio']:.4f})"
                for r in rows
            )
            yield ""
            yield f"{name}: {listed}."
    for r in found["fixed"]:
        if judged(r) in (BROKEN, UNRESOLVED):
            state = "broken" if judged(r) == BROKEN else UNRESOLVED
            yield ""
            yield (
                f"{r['way']}, {r['policy']}: the fixed cost is {state}; promised are at most "
                f"{r['promised_microseconds']:.0f} us, found {microseconds(r['fixed'])}."
            )


def microseconds(interval: Mapping[str, float]) -> str:
    """A cost of seconds with its interval."""
    values = (1e6 * interval[name] for name in ("middle", "low", "high"))
    return "{:+.0f} us ({:+.0f} to {:+.0f})".format(*values)


def ablation(path: Path) -> Iterator[str]:
    """What each setting of the LSTM's profile brings."""
    found = json.loads(path.read_text(encoding="utf-8"))
    yield (
        f"{where(found)}, torch {found['torch']}. An LSTM language model was tuned to "
        f"{words(found['recipe'])}, said to be {ratio_text(found['claimed'])} the float32 as it "
        f"was run; each row trained for {found['seconds']:g} s in a fresh process, "
        f"{found['rounds']} times in alternation."
    )
    yield ""
    yield "| way | its throughput over the profile's |"
    yield "|---|---|"
    others = found["rows"][1:]
    for row in others:
        yield f"| {row['way']} | {ratio_text(row['over_profile'], 3)} |"
    faster = [row["way"] for row in others if row["over_profile"]["low"] > 1]
    slower = [row["way"] for row in others if row["over_profile"]["high"] < 1]
    yield ""
    yield (
        f"Beyond the interval, faster than the profile: {'; '.join(faster) or 'none'}. "
        f"Slower: {'; '.join(slower) or 'none'}."
    )


#: By field of a row of `applied`, its column.
APPLIED = {
    "claimed": "claimed",
    "applied": "in fresh processes",
    "claimed_same_batch": "claimed at its batch",
    "applied_same_batch": "in fresh processes at its batch",
    "applied_over_by_hand": "over the same recipe set by hand",
}


def applied(path: Path) -> Iterator[str]:
    """What a profile claims, and what it brings in processes of its own."""
    found = json.loads(path.read_text(encoding="utf-8"))
    shown = {name: said for name, said in APPLIED.items() if any(map(_has(name), found["rows"]))}
    at_batch = "; the same over the plain loop at the profile's batch"
    yield (
        f"{where(found)}, torch {found['torch']}: each profile's speed-up as the tuning measured "
        "it, and in fresh processes, a loop with the profile over the plain loop"
        f"{at_batch if 'applied_same_batch' in shown else ''}."
    )
    yield ""
    yield f"| task | chosen | {' | '.join(shown.values())} |"
    yield "|---" * (2 + len(shown)) + "|"
    for row in sorted(found["rows"], key=lambda r: r["applied"]["ratio"] / r["claimed"]["ratio"]):
        said = [ratio_text(row[name]) if row.get(name) else NOT_MEASURED for name in shown]
        yield f"| {row['task']} | {words(row['recipe'])} | {' | '.join(said)} |"


def _has(name: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a row was measured in this column."""
    return lambda row: row.get(name) is not None


def regret(path: Path) -> Iterator[str]:
    """What a tuning loses when other processes come and go."""
    found = json.loads(path.read_text(encoding="utf-8"))
    yield (
        f"{where(found)}, torch {found['torch']}: what a tuning chose while a process kept a core "
        "busy now and then, over what it chose on the idle machine; both measured there, in "
        "alternation."
    )
    yield ""
    yield from _regrets(path)
    yield from other_runs(path, _regrets)


def _regrets(path: Path) -> Iterator[str]:
    """One run's rows, the worst first."""
    found = json.loads(path.read_text(encoding="utf-8"))
    yield "| task | idle choice | disturbed choice | a core was busy | disturbed/idle |"
    yield "|---|---|---|---|---|"
    for row in sorted(found["rows"], key=lambda r: float(r["disturbed_over_idle"]["ratio"])):
        busy = f"{row['busy_seconds']:.0f} of {row['tuning_seconds']:.0f} s"
        unsure = " (inconclusive)" if row["inconclusive"] else ""
        yield (
            f"| {row['task']} | {words(row['idle'])} | {words(row['disturbed'])}{unsure} | {busy} "
            f"| {ratio_text(row['disturbed_over_idle'], 3)} |"
        )


def null(path: Path) -> Iterator[str]:
    """How often a speed-up is claimed between recipes that are the same."""
    found = json.loads(path.read_text(encoding="utf-8"))
    yield f"{where(found)}."
    yield ""
    yield from _claims(path)
    yield from other_runs(path, _claims, older=True)


def _claims(path: Path) -> Iterator[str]:
    for kind, run in json.loads(path.read_text(encoding="utf-8"))["runs"].items():
        yield f"- {kind}: {run['summary']}."


def reductions(path: Path) -> Iterator[str]:
    """What gradients travel in, over a simulated slow link and without one."""
    found = json.loads(path.read_text(encoding="utf-8"))
    yield (
        f"{where(found)}. Tunings from scratch of `benchmarks/ranks/slow_link.py` on two ranks "
        "(DDP, Gloo, one machine), each with another seed. The link is simulated: every collective "
        "is followed by a sleep as long as its bytes would take, so nothing overlaps. *Waits* is "
        "the share of the float32 baseline's step that waits for the other rank."
    )
    yield ""
    yield "| link | gradients travel in | tunings | speed-up in all | waits |"
    yield "|---|---|---|---|---|"
    groups: dict[tuple[float | None, str], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault((row["gigabytes_per_second"], row["reduce_dtype"]), []).append(row)
    for (rate, dtype), rows in groups.items():
        link = "none" if rate is None else f"{rate:g} GB/s"
        of = sum(row["gigabytes_per_second"] == rate for row in found["rows"])
        gains = [row["speedup"]["ratio"] for row in rows]
        waits = [row["exposed_in_baseline"]["ratio"] for row in rows if row["exposed_in_baseline"]]
        gain = f"{times(min(gains))} to {times(max(gains))}"
        wait = f"{min(waits):.0%} to {max(waits):.0%}" if waits else "not measured"
        yield f"| {link} | {dtype or 'not distributed'} | {len(rows)} of {of} | {gain} | {wait} |"


def startup(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    told = f", Python {found['python']}: {found['rounds']} rounds" if "commands" in found else ""
    yield f"{where(head_of(path))}{told}."
    yield ""
    yield "| command | median | quartiles |"
    yield "|---|---|---|"
    for name, r in found.get("commands", found).items():
        quartiles = f"{r['low'] * 1e3:.0f}-{r['high'] * 1e3:.0f} ms"
        yield f"| `{name}` | {r['median'] * 1e3:.0f} ms | {quartiles} |"


def keep_memory(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    yield (
        f"{where(found)}, torch {found['torch']}: the throughput of a training "
        "that keeps its freed memory over one that leaves it to glibc, in alternation."
    )
    yield ""
    yield "| task | policy | batch | kept/plain | peak plain | peak kept |"
    yield "|---|---|---|---|---|---|"
    for r in found["rows"]:
        plain, kept = (f"{peak / 2**30:.2f} GiB" for peak in r["peak_bytes"])
        ratio = ratio_text(r["kept_over_plain"])
        yield f"| {r['task']} | {r['policy']} | {r['batch']} | {ratio} | {plain} | {kept} |"
    yield ""
    gains = [r["kept_over_plain"]["ratio"] for r in found["rows"]]
    yield f"In the geometric mean {times(mean(gains))}, at worst {times(min(gains))}."


def memory_growth(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    few, steps = found["few_steps"], found["steps"]
    yield (
        f"{where(found)}, torch {found['torch']}: a small GPT in bfloat16 at batch "
        f"{found['batch']}, with texts of one length or of any; each row is a process. Peaks of "
        f"resident memory so far. A trial sees about the first {few} steps."
    )
    yield ""
    yield f"| texts | freed memory | {few} steps | {steps} steps | and an evaluation | grew |"
    yield "|---|---|---|---|---|---|"
    for r in found["rows"]:
        peaks = [r[name] for name in ("few_steps", "all_steps", "after_evaluation")]
        told = " | ".join(f"{peak / 2**30:.2f} GiB" for peak in peaks)
        kept = "kept" if r["kept"] else "not kept"
        yield f"| of {r['lengths']} length | {kept} | {told} | {times(peaks[-1] / peaks[0])} |"


def compiled(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    yield (
        f"{where(found)}, torch {found['torch']}: torch.compile against eager at "
        "the same batch and policy, in alternation."
    )
    yield ""
    yield "| task | policy | batch | compiled/eager | compiling | recovered after |"
    yield "|---|---|---|---|---|---|"
    for r in found["rows"]:
        start = f"| {r['task']} | {r['policy']} | {r['batch']} |"
        if "failed" in r:
            yield f"{start} fails: {r['failed'].replace('|', '/')} | - | - |"
            continue
        steps = r["break_even_steps"]
        yield (
            f"{start} {ratio_text(r['compiled_over_eager'])} | {r['compile_seconds']:.0f} s | "
            f"{'never' if steps is None else f'{steps} steps'} |"
        )


def replay(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    rows = found if isinstance(found, list) else found["rows"]
    yield (
        "Recorded grids (benchmarks/curves/), 3 % noise on every trial; no model trains. gpt's "
        "grids hold padding to 2, which was tried on CPUs then and is no longer: a tuning there "
        f"now has half of their points. {staleness_in_words('replay', found)}"
    )
    yield ""
    yield "| grid | sampler | points | mean regret | worst | trials | share of the points |"
    yield "|---|---|---|---|---|---|---|"
    for r in rows:
        yield (
            f"| {r['grid']} | {r['sampler']} | {r['points']} | {r['mean_regret']:.2%} | "
            f"{r['worst_regret']:.2%} | {r['mean_trials']:.1f} | {r['share_of_points']:.0%} |"
        )


def growth(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    yield f"{where(found)}, a multilayer perceptron; one tuning from scratch a row."
    yield ""
    yield (
        "| varied | parameters | knobs | batches | trials | search | check | interleaved timing | "
        "total |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for r in found["rows"]:
        stages: Mapping[str, Any] = r["stages"]
        yield (
            f"| {r['what']} | {r['parameters'] / 1e6:.2f} M | {r['knobs']} | {r['batches']} | "
            f"{r['trials']} of {r['points']} | {stages.get('search', 0.0):.0f} s | "
            f"{proof(stages):.0f} s | {interleaved_timing(stages):.0f} s | {r['seconds']:.0f} s |"
        )
    if "note" in found:
        yield ""
        yield f"{found['note']}."
