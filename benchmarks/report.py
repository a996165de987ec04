"""Writes docs/results.md from what the benchmarks left in benchmarks/results/.

    python benchmarks/report.py

Nothing is measured here and nothing is rounded up: every table names the command that prints it,
and a benchmark without a result says so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_tables

RESULTS = Path(__file__).parent / "results"
TASKS = Path(__file__).parent / "tasks"
PAGE = Path(__file__).parent.parent / "docs" / "results.md"

README = Path(__file__).parent.parent / "README.md"

HEAD = """\
# Results

Made by `python benchmarks/report.py` from the data in `benchmarks/results/`; every table names the
command that prints it. Four machines were at hand, all virtual with 2 cores and no accelerator:

- **Xeon with AMX**: an Intel Xeon that has AMX and AVX512_BF16 (`intel-amx` in the catalogue).
  Matrix products in bfloat16 run six to seven times as fast as in float32.
- **Zen 5**: an AMD EPYC with AVX512_BF16 (`amd-zen5`). When its grids were recorded (all but gpt's
  and keras_mlp's), many recipes' rates differed by a fifth from one process to the next; when the
  tables were made it was quieter: a round's ratio of two recipes varied by 3 %.
- **Zen 4**: an AMD EPYC with AVX512_BF16 (`amd-zen4`). Its speed fell by a quarter and came back
  every few seconds.
- **Zen 3**: an AMD EPYC without 16-bit arithmetic. Its 16-bit products are 30 to 100 times slower
  than float32's, so the right answer for speed is float32 everywhere; the numerics are the same as
  elsewhere, because emulated arithmetic rounds like real one.

No TPU was measured; what was of GPUs is in the last section. Tables that name no machine are from
the Xeon.
"""

GPUS = (
    "`make gpu-evidence`, data: `benchmarks/results/gpu_*.jsonl`. Each policy's throughput over "
    "plain float32's at the same batch, in alternation, as it is and under torch.compile; and what "
    "one tuning chose, over float32 as it was run.",
)

MACHINES = {"intel-amx": "Xeon with AMX", "amd-zen5": "Zen 5", "amd-zen4": "Zen 4"}


def latest(name: str, suffix: str = "json") -> list[Path]:
    """The newest result of a benchmark on each machine: the newest first, of a day the fullest."""
    newest: dict[str, Path] = {}
    for path in sorted(RESULTS.glob(f"{name}-*.{suffix}")):
        family = re.search(r'"family": "([^"]+)"', path.read_text())
        newest[family[1] if family else ""] = path
    day = len("-2026-11-22")
    return sorted(
        newest.values(), key=lambda p: (p.stem[: len(name) + day], p.stat().st_size), reverse=True
    )


def where(found: Mapping[str, Any]) -> str:
    """When, on which machine and, where that was kept, of which commit a table was measured."""
    family = found.get("family", "intel-amx")
    of = f", commit {found['commit']}" if "commit" in found else ""
    return f"{found['date']}, {MACHINES.get(family, family)}{of}"


def overhead(path: Path) -> Iterator[str]:
    yield "| policy | step by hand | with apply_profile | cost |"
    yield "|---|---|---|---|"
    for r in json.loads(path.read_text()):
        yield (
            f"| {r['policy']} | {r['step_milliseconds']:.2f} ms | {r['ratio']:.4f}x "
            f"({r['low']:.4f}-{r['high']:.4f}) | {r['overhead_microseconds']:+.0f} us |"
        )


def startup(path: Path) -> Iterator[str]:
    yield "| command | median | quartiles |"
    yield "|---|---|---|"
    for name, r in json.loads(path.read_text()).items():
        quartiles = f"{r['low'] * 1e3:.0f}-{r['high'] * 1e3:.0f} ms"
        yield f"| `{name}` | {r['median'] * 1e3:.0f} ms | {quartiles} |"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def share_of_search(r: Mapping[str, Any], *, finish: bool = True) -> float:
    """The time of all that chooses, trials and contests, over the grid's."""
    seconds = r["stages"].get("search", 0.0) + contests(r["stages"])
    seconds -= 0.0 if finish else r["stages"].get("finish", 0.0)
    return float(max(seconds, 1e-3) / r["grid_seconds"])


def contests(stages: Mapping[str, float]) -> float:
    """The seconds of the alternations: the fastest recipes, the finalists, the winner."""
    return stages.get("heats", 0.0) + stages.get("finish", 0.0)


def ratio_text(ratio: Mapping[str, float]) -> str:
    interval = f" ({ratio['low']:.3f}-{ratio['high']:.3f})" if ratio["low"] < ratio["high"] else ""
    return f"{ratio['ratio']:.3f}{interval}"


def oracle(path: Path) -> Iterator[str]:
    results = lines_of(path)
    first = results[0]
    yield (
        f"{where(first)}, torch {first['torch']}, Keras {first['keras']} on "
        f"TensorFlow {first['tensorflow']}. The best of an exhaustive grid (batch 8 to 1024, "
        "policy, layout, XLA, and for PyTorch freed memory kept or not; a fresh process for each "
        "recipe and 5 s, more where the steps are longer) against what `autoprec tune` chose, "
        "measured in alternation with 95 % intervals. search/grid counts the trials and the "
        "contests, in which the fastest recipes, the finalists and the winner run in alternation; "
        "it leaves out the first step and the proof, and the start of the grid's processes. Where "
        "1.000 has no interval, both are the same recipe."
    )
    yield ""
    yield (
        "| task | chosen/best | chosen/float32 default | best/float32 default | search/grid | "
        "trials | first step | search | contests | proof | chosen |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for r in results:
        best, over, top = r["chosen_over_best"], r["chosen_over_float32"], r["best_over_float32"]
        recipe, stages = r["recipes"]["chosen"], r["stages"]
        chosen = f"{recipe['policy']}, batch {recipe['batch_size']}"
        if recipe.get("compile"):
            chosen += ", XLA"
        if recipe.get("memory_format") == "channels_last":
            chosen += ", channels last"
        if recipe.get("knobs", {}).get("keep_memory"):
            chosen += ", memory kept"
        proof = stages.get("proof", 0.0) + stages.get("islands", 0.0)
        yield (
            f"| {r['task']} | {ratio_text(best)} | "
            f"{over['ratio']:.2f}x | {top['ratio']:.2f}x | {share_of_search(r):.0%} | "
            f"{r['trials']} of {r['points']} | {stages.get('preflight', 0.0):.0f} s | "
            f"{stages.get('search', 0.0):.0f} s | {contests(stages):.0f} s | {proof:.0f} s | "
            f"{chosen} |"
        )
    counted = [r for r in results if not r.get("older")]
    ratios = [r["chosen_over_best"]["ratio"] for r in counted]
    seeds = [abs(math.log(r["second_over_chosen"]["ratio"])) for r in counted]
    kept = mean(
        r["chosen_over_float32"]["ratio"] / r["best_over_float32"]["ratio"] for r in counted
    )
    older = ", ".join(r["task"] for r in results if r.get("older"))
    left_out = f" without {older}" if older else ""
    yield ""
    yield (
        f"Geometric means{left_out}: chosen/best {mean(ratios):.3f} (worst {min(ratios):.3f}), "
        f"search/grid {mean(map(share_of_search, counted)):.1%} (without the last of them "
        f"{mean(share_of_search(r, finish=False) for r in counted):.1%}); of the best's gain over "
        f"the float32 default {kept:.3f} is kept. Two seeds choose recipes at most "
        f"{max(seeds):.1%} apart. Trials killed by the operating system: "
        f"{sum(r['killed'] for r in counted)}."
    )
    missing = {path.stem for path in TASKS.glob("*.py")} - {r["task"] for r in results}
    if missing:
        yield ""
        yield f"Not measured on this machine: {', '.join(sorted(missing))}."
    yield from notes(results)


def notes(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is to be known of single rows, and of which."""
    for note in dict.fromkeys(r["note"] for r in results if "note" in r):
        named = ", ".join(r["task"] for r in results if r.get("note") == note)
        yield ""
        yield f"{named}: {note}."


def peers(path: Path) -> Iterator[str]:
    results = lines_of(path)
    first = results[0]
    yield (
        f"{where(first)}, torch {first['torch']}, lightning {first['lightning']}, "
        f"accelerate {first['accelerate']}, pytorch-autotune {first['pytorch-autotune']}. "
        "ours/theirs is the throughput of autoprec's choice over theirs, in alternation."
    )
    yield ""
    yield "| task | peer | chose | search | peak memory | ours/theirs | note |"
    yield "|---|---|---|---|---|---|---|"
    for r in results:
        for peer, found in r["peers"].items():
            recipe, seconds = found.get("recipe"), found.get("seconds")
            chose = f"{recipe['policy']}, batch {recipe['batch_size']}" if recipe else "nothing"
            memory = found.get("peak_memory_bytes")
            ratio = found.get("ours_over") if peer != "autoprec" else None
            yield (
                f"| {r['task']} | {peer} | {chose} | "
                + (f"{seconds:.0f} s | " if seconds is not None else "- | ")
                + (f"{memory / 2**30:.1f} GiB | " if memory else "- | ")
                + (
                    f"{ratio['ratio']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"
                    if ratio
                    else "-"
                )
                + f" | {found['note'].replace('|', '/')} |"
            )
    best = [r["ours_over_best_peer"] for r in results]
    yield ""
    yield (
        f"autoprec's choice over the best peer's: {mean(best):.3f} in the geometric mean, "
        f"{min(best):.3f} at worst."
    )
    yield from notes(results)


def replay(path: Path) -> Iterator[str]:
    rows = json.loads(path.read_text())
    yield (
        "Recorded grids (benchmarks/curves/), 3 % noise on every trial; no model trains. gpt's "
        "grids hold padding to 2, which was tried on CPUs then and is no longer: a tuning there "
        "now has half of their points."
    )
    yield ""
    yield "| grid | sampler | points | mean regret | worst | trials | share of the points |"
    yield "|---|---|---|---|---|---|---|"
    for r in rows:
        yield (
            f"| {r['grid']} | {r['sampler']} | {r['points']} | {r['mean_regret']:.2%} | "
            f"{r['worst_regret']:.2%} | {r['mean_trials']:.1f} | {r['share_of_points']:.0%} |"
        )


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
    yield f"In the geometric mean {mean(gains):.2f}x, at worst {min(gains):.2f}x."


def compiled(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    yield (
        f"{where(found)}, torch {found['torch']}: torch.compile against eager at "
        "the same batch and policy, in alternation."
    )
    yield ""
    yield "| task | policy | batch | compiled/eager | compiling | won back after |"
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


def growth(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    yield f"{where(found)}, a multilayer perceptron; one tuning from scratch a row."
    yield ""
    yield "| varied | parameters | knobs | batches | trials | search | proof | contests | total |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for r in found["rows"]:
        stages = r["stages"]
        proof = stages.get("proof", 0.0) + stages.get("islands", 0.0)
        yield (
            f"| {r['what']} | {r['parameters'] / 1e6:.2f} M | {r['knobs']} | {r['batches']} | "
            f"{r['trials']} of {r['points']} | {stages.get('search', 0.0):.0f} s | {proof:.0f} s | "
            f"{contests(stages):.0f} s | {r['seconds']:.0f} s |"
        )
    if "note" in found:
        yield ""
        yield f"{found['note']}."


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
    names = ("injected", "survived", "trials_lost", "half_written", "survivors")
    yield "| framework | faults | survived | trials lost | half-written files | processes left |"
    yield "|---|---|---|---|---|---|"
    for row in json.loads(path.read_text())["soaks"]:
        sums = [sum(kind[name] for kind in row["faults"].values()) for name in names]
        yield f"| {row['framework']} | " + " | ".join(str(count) for count in sums) + " |"
        for problem in row["problems"]:
            yield f"| | not survived: {problem.split(':')[0]}, while Python was importing | | | | |"


SECTIONS: tuple[tuple[str, str, str, str, Callable[[Path], Iterator[str]]], ...] = (
    ("What apply_profile costs a step", "overhead", "json", "benchmarks/overhead.py", overhead),
    ("Start-up", "startup", "json", "benchmarks/startup.py", startup),
    ("Against an exhaustive search", "oracle", "jsonl", "benchmarks/oracle.py", oracle),
    ("Freed memory kept", "keep_memory", "json", "benchmarks/keep_memory.py", keep_memory),
    ("torch.compile", "compiled", "json", "benchmarks/compiled.py", compiled),
    ("Beside the peers", "peers", "jsonl", "benchmarks/peers.py", peers),
    ("Samplers replayed", "replay", "json", "benchmarks/replay.py", replay),
    ("How tuning time grows", "growth", "json", "benchmarks/growth.py", growth),
    ("Numerics: the zoo", "numerics", "json", "benchmarks/numerics.py", numerics),
    ("Speed kept by islands", "islands", "json", "benchmarks/islands_speed.py", islands),
    ("Faults: the soak", "soak", "json", "benchmarks/soak.py", soak),
)


def main() -> None:
    """Write the page."""
    lines = [HEAD]
    for title, name, suffix, command, section in SECTIONS:
        paths = latest(name, suffix)
        lines += [f"## {title}", ""]
        if not paths:
            lines += [f"No result yet: `python {command}` prints it.", ""]
        for path in paths:
            lines += [f"`python {command}`, data: `benchmarks/results/{path.name}`.", ""]
            lines += [*section(path), ""]
    found = gpu_tables.read(RESULTS)
    lines += ["## GPUs", "", *GPUS, "", *gpu_tables.section(found), ""]
    PAGE.write_text("\n".join(lines))
    print(f"wrote {PAGE}")
    tables = latest("oracle", "jsonl")
    text = with_table(README.read_text(), "gpus", gpu_tables.speed(found))
    README.write_text(with_table(text, "oracle", oracle(tables[0])) if tables else text)
    print(f"wrote the tables in {README}")


def with_table(text: str, name: str, table: Iterable[str]) -> str:
    """The README with this table between its marks."""
    begin, end = f"<!-- {name}: made by benchmarks/report.py -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([before + begin, *table, end + after])


if __name__ == "__main__":
    main()
