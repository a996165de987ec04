"""Writes docs/results.md, and the README's tables, from what is in benchmarks/results/.

    python benchmarks/report.py

Nothing is measured here and nothing is rounded up: every table names the command that prints it,
and a benchmark without a result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import gpu_tables
from provenance import RESULTS, ROOT
from reading import latest
from report_proof import fuzz, islands, numerics, soak
from report_search import SHOWN, holdout, machines, oracle, oracle_summary, peers
from report_speed import (
    ablation,
    applied,
    compiled,
    growth,
    keep_memory,
    null,
    overhead,
    regret,
    replay,
    startup,
)

PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"

HEAD = """\
# Results

Made by `python benchmarks/report.py` from the data in `benchmarks/results/`; every table names the
command that prints it, and earlier runs stay in that folder under their date. The machines, all
virtual with 2 cores and no accelerator:

- **Xeon with AMX**: an Intel Xeon that has AMX and AVX512_BF16 (`intel-amx` in the catalogue).
- **Zen 5**: an AMD EPYC with AVX512_BF16 (`amd-zen5`). When its grids were recorded (all but gpt's
  and keras_mlp's), many recipes' rates differed from one process to the next; it was quieter when
  the tables were made.
- **Zen 4**: an AMD EPYC with AVX512_BF16 (`amd-zen4`), whose speed came and went while it was
  measured.
- **Zen 3**: an AMD EPYC without 16-bit arithmetic (`amd-zen3`): its probe was recorded, nothing was
  tuned on it.

No TPU was measured; what was of GPUs is in the last section. Tables that name no machine are from
the Xeon.
"""

GPUS = (
    "`make gpu-evidence`, data: `benchmarks/results/gpu_*.jsonl`. Each policy's throughput over "
    "plain float32's at the same batch, in alternation, as it is and under torch.compile; and what "
    "one tuning chose, over float32 as it was run.",
)

Section = Callable[[Path], Iterator[str]]

#: Title, benchmark, ending, what makes its lines.
SECTIONS: tuple[tuple[str, str, str, str, Section], ...] = (
    ("What apply_profile costs a step", "overhead", "json", "benchmarks/overhead.py", overhead),
    ("Start-up", "startup", "json", "benchmarks/startup.py", startup),
    ("Against an exhaustive search", "oracle", "jsonl", "benchmarks/oracle.py", oracle),
    ("Tasks held out", "holdout", "json", "benchmarks/holdout.py", holdout),
    ("Profiles in fresh processes", "applied", "json", "benchmarks/applied.py", applied),
    ("What an LSTM's settings bring", "ablation", "json", "benchmarks/ablation.py", ablation),
    ("Beside processes that come and go", "regret", "json", "benchmarks/regret.py", regret),
    ("Recipes that are the same", "null", "json", "benchmarks/null.py", null),
    ("Freed memory kept", "keep_memory", "json", "benchmarks/keep_memory.py", keep_memory),
    ("torch.compile", "compiled", "json", "benchmarks/compiled.py", compiled),
    ("Beside the peers", "peers", "jsonl", "benchmarks/peers.py", peers),
    ("Samplers replayed", "replay", "json", "benchmarks/replay.py", replay),
    ("How tuning time grows", "growth", "json", "benchmarks/growth.py", growth),
    ("Numerics: the zoo", "numerics", "json", "benchmarks/numerics.py", numerics),
    ("Numerics: Keras", "numerics_keras", "json", "benchmarks/numerics.py", numerics),
    ("Speed kept by islands", "islands", "json", "benchmarks/islands_speed.py", islands),
    ("Faults: the soak", "soak", "json", "benchmarks/soak.py", soak),
    ("Files that are none: the fuzzers", "fuzz", "json", "benchmarks/fuzz.py", fuzz),
)


def page() -> str:
    """The whole of docs/results.md."""
    lines = [HEAD, f"## One task on every machine: {SHOWN}", "", *machines(), ""]
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
    return "\n".join(lines)


def readme(text: str) -> str:
    """The README with its tables made anew."""
    text = with_table(text, "machines", machines())
    text = with_table(text, "gpus", gpu_tables.speed(gpu_tables.read(RESULTS)))
    return with_table(text, "oracle", oracle_summary())


def with_table(text: str, name: str, table: Iterable[str]) -> str:
    """The README with this table between its marks."""
    begin, end = f"<!-- {name}: made by benchmarks/report.py -->", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"no place for the table {name!r}: expected {begin} and {end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([before + begin, *table, end + after])


def main() -> None:
    """Write the page and the README's tables."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables in {README}")


if __name__ == "__main__":
    main()
