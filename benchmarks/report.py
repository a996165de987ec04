"""Writes docs/results.md from what the benchmarks left in benchmarks/results/.

    python benchmarks/report.py

Nothing is measured here and nothing is rounded up: every table names the command that prints it,
and a benchmark without a result says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "results.md"

HEAD = """\
# Results

Made by `python benchmarks/report.py` from the data in `benchmarks/results/`. All of it was measured
on one kind of machine: 2 cores of an AMD EPYC (Zen 3) in a virtual machine, without bfloat16 or
float16 arithmetic and without an accelerator. On such a CPU 16-bit matrix products are 30 to 100
times slower than float32's, so the right answer for speed is float32 everywhere; the numerics are
the same as elsewhere, because emulated arithmetic rounds like real one. **No speed-up by a 16-bit
policy was measured on real hardware in this version.**
"""


def latest(name: str, suffix: str = "json") -> Path | None:
    """The newest result of a benchmark."""
    found = sorted(RESULTS.glob(f"{name}-*.{suffix}"))
    return found[-1] if found else None


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


def oracle(path: Path) -> Iterator[str]:
    yield (
        "chosen/best and chosen/float32 are ratios of throughput in alternation with their 95 % "
        "interval; search/grid is the time of the search over that of the grid, process start not "
        "counted for the grid."
    )
    yield ""
    yield "| task | chosen/best | chosen/float32 default | search/grid | trials of grid | chosen |"
    yield "|---|---|---|---|---|---|"
    for line in path.read_text().splitlines():
        r = json.loads(line)
        best, over = r["chosen_over_best"], r["chosen_over_float32"]
        share = r["search_seconds"] / r["grid_seconds"]
        chosen = f"{r['chosen']['policy']}, batch {r['chosen']['batch_size']}"
        yield (
            f"| {r['task']} | {best['ratio']:.3f} ({best['low']:.3f}-{best['high']:.3f}) | "
            f"{over['ratio']:.2f}x ({over['low']:.2f}-{over['high']:.2f}) | {share:.0%} | "
            f"{r['trials']} of {r['points']} | {chosen} |"
        )


def numerics(path: Path) -> Iterator[str]:
    found = json.loads(path.read_text())
    yield f"Note of the run: {found['note']}."
    yield ""
    yield "| policy (3 seeds) | broken caught | healthy flagged |"
    yield "|---|---|---|"
    for policy, r in found["confusion"]["table"].items():
        caught, flagged = r["broken_caught"], r["healthy_flagged"]
        yield f"| {policy} | {share_of(caught)} | {share_of(flagged)} |"
    yield ""
    yield "Aimed at: 97 % caught, 2 % flagged. What was judged wrong is listed in the data."
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
    ("Numerics: the zoo", "numerics", "json", "benchmarks/numerics.py", numerics),
    ("Faults: the soak", "soak", "json", "benchmarks/soak.py", soak),
)


def main() -> None:
    """Write the page."""
    lines = [HEAD]
    for title, name, suffix, command, section in SECTIONS:
        path = latest(name, suffix)
        lines += [f"## {title}", ""]
        if path is None:
            lines += [f"No result yet: `python {command}` prints it.", ""]
            continue
        lines += [f"`python {command}`, data: `benchmarks/results/{path.name}`.", ""]
        lines += [*section(path), ""]
    PAGE.write_text("\n".join(lines))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
