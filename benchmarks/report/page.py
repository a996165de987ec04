"""docs/results.md, other pages' tables and the picture of a report, from benchmarks/results/.

Nothing is measured here and nothing is rounded up: every table names the command that prints it,
and a benchmark without a result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from autoprec.core.number_words import times
from benchmarks.checkout import RESULTS, ROOT
from benchmarks.report import gpu, real_gpu
from benchmarks.report.latest import MACHINES, head_of, latest
from benchmarks.report.limits import limits
from benchmarks.report.measured import UNMEASURED, measured
from benchmarks.report.picture import picture
from benchmarks.report.proof import (
    constants,
    fuzz,
    islands,
    late_breaks,
    newcomer,
    numerics,
    proof_costs,
    soak,
    watched,
)
from benchmarks.report.search import (
    COUNTED_ONCE_SINCE,
    SHOWN,
    holdout,
    machines,
    oracle,
    oracle_summary,
    peers,
)
from benchmarks.report.settings import settings
from benchmarks.report.speed import (
    ablation,
    applied,
    compiled,
    growth,
    keep_memory,
    memory_growth,
    null,
    overhead,
    reductions,
    regret,
    replay,
    startup,
)
from benchmarks.report.summary import summary

PAGE = ROOT / "docs" / "results.md"
PICTURE = ROOT / "docs" / "report.svg"

#: Pages written by hand, each with the table in it that is made here.
TABLES: dict[Path, tuple[str, Callable[[], Iterable[str]]]] = {
    ROOT / "README.md": ("results", summary),
    ROOT / "docs" / "first-hour.md": ("newcomer", newcomer),
    ROOT / "docs" / "method.md": ("limits", limits),
    ROOT / "docs" / "reference.md": ("settings", settings),
}

HEAD = """\
# Results

Made by `python -m benchmarks.report` from the data in `benchmarks/results/`; every table names the
command that prints it. Where a section does not show a machine's earlier runs, it names their
files. The machines, all virtual, those named after a processor with 2 cores and no accelerator:

- **Xeon with AMX**: an Intel Xeon that has AMX and AVX512_BF16 (`intel-amx` in the catalogue).
- **Emerald Rapids**: such a Xeon of 2023 (`intel-emerald-rapids`).
- **Zen 5**: an AMD EPYC with AVX512_BF16 (`amd-zen5`). When grids of `benchmarks/curves/` were
  recorded on 2026-11-22 (all but encoder's, gpt's and keras_mlp's), many recipes' rates differed
  from one process to the next. *Samplers replayed* uses these grids; the comparison with an
  exhaustive search has its own of 2026-11-26, when it was quieter.
- **Zen 4**: an AMD EPYC with AVX512_BF16 (`amd-zen4`), whose speed came and went while it was
  measured.
- **Zen 3**: an AMD EPYC without 16-bit arithmetic (`amd-zen3`).
- **NVIDIA H200** and **NVIDIA H100 80GB HBM3**: one GPU beside 16 cores of an Intel Xeon (Emerald
  Rapids), each for half an hour; their results are in the last section, and in a section each where
  they are of a benchmark that others ran, too.

No TPU was measured. Where a result did not keep the name of its machine, its table says so.
"""

WITHDRAWN = (
    f"What profiles of before {COUNTED_ONCE_SINCE} said of arithmetic is left out: operations "
    "below a list or a dictionary of modules were counted twice or more. The data still holds it "
    "(`reason`, `peak_share`). Throughputs, ratios and verdicts do not rest on it."
)

GPUS = (
    "`make gpu-evidence`, data: `benchmarks/results/gpu_*.jsonl`. These tasks are too small for a "
    "recent GPU: a step takes as long as its launches, which the policy does not change, until the "
    "batch is large. float32 is as PyTorch starts: convolutions (unet) in TF32. Each policy's "
    "throughput over plain float32's at the same batch, in alternation, as it is and under "
    "torch.compile; and what one tuning chose, over float32 as it was run, and over float32 at the "
    "batch chosen. Those tunings had 25 s for their search, so that not every policy was tried at "
    "every batch: on the H100 a U-Net's bfloat16 and float16 ran at batch 32 alone. Without "
    "`--search-limit` they are."
)

Section = Callable[[Path], Iterator[str]]

#: Title, the result file's prefix and ending, the program that writes it, what makes the lines.
SECTIONS: tuple[tuple[str, str, str, str, Section], ...] = (
    ("What apply_profile costs a step", "overhead", "json", "overhead.compare", overhead),
    ("Start-up", "startup", "json", "overhead.startup", startup),
    ("Against an exhaustive search", "oracle", "jsonl", "search.oracle", oracle),
    ("Tasks held out", "holdout", "json", "profiles.holdout", holdout),
    ("Profiles in fresh processes", "applied", "json", "profiles.fresh_process", applied),
    ("What an LSTM's settings bring", "ablation", "json", "ablations.lstm_settings", ablation),
    ("While other processes come and go", "regret", "json", "search.regret", regret),
    ("Speed-ups claimed between identical recipes", "null", "json", "search.false_speedups", null),
    (
        "What gradients travel in",
        "reduce_dtype",
        "json",
        "search.reduce_dtype",
        reductions,
    ),
    ("Freed memory kept", "keep_memory", "json", "ablations.keep_memory", keep_memory),
    (
        "Kept memory over a long training",
        "memory_growth",
        "json",
        "ablations.memory_growth",
        memory_growth,
    ),
    ("torch.compile", "compiled", "json", "ablations.compiled", compiled),
    ("Compared with other tools", "peers", "jsonl", "peers.compare", peers),
    ("Samplers replayed", "replay", "json", "search.replay", replay),
    ("How tuning time grows", "growth", "json", "search.growth", growth),
    ("Numerics: the zoo", "numerics", "json", "numerics.zoo", numerics),
    ("Numerics: Keras", "numerics_keras", "json", "numerics.zoo", numerics),
    (
        "A constant in the loss",
        "loss_constants",
        "json",
        "numerics.loss_constants",
        constants,
    ),
    ("What a check costs", "proof_costs", "json", "numerics.proof_costs", proof_costs),
    ("Checks during training", "watched", "json", "numerics.watched", watched),
    ("What breaks late", "late_breaks", "json", "numerics.late_breaks", late_breaks),
    ("Speed kept by islands", "islands", "json", "numerics.islands_speed", islands),
    ("Faults: the soak", "soak", "json", "faults.soak", soak),
    ("Malformed files: the fuzzers", "fuzz", "json", "faults.fuzz", fuzz),
)


def page() -> str:
    """The whole of docs/results.md."""
    title = f"## One task on every machine: {SHOWN}"
    lines = [HEAD, title, "", *machines(), "", *host_bound(), "", WITHDRAWN, ""]
    lines += ["## What was measured where", "", *measured(), "", UNMEASURED, ""]
    for title, name, suffix, module, section in SECTIONS:
        command = f"python -m benchmarks.{module}"
        paths = latest(name, suffix)
        lines += [f"## {title}", ""]
        if not paths:
            lines += [f"No result yet: `{command}` prints it.", ""]
        own: list[str] = []
        if section is oracle and paths:
            own += [*oracle_summary(), ""]
        for path in paths:
            data = f"`{command}`, data: `benchmarks/results/{path.name}`."
            unnamed = name != "replay" and "family" not in head_of(path)
            own += [f"{data} Its machine was not kept." if unnamed else data, ""]
            own += [*section(path), ""]
        lines += [*own, *left_out(name, suffix, own)]
    found = gpu.read(RESULTS)
    lines += ["## GPUs", "", real_gpu.NOTE, "", *real_gpu.models(found), ""]
    for device, pieces in found.items():
        ways = list(real_gpu.every_way(pieces))
        lines += [f"{device}, every way:", "", *ways] if ways else []
    lines += ["### Small tasks on a GPU", "", GPUS, "", *host_bound(), "", *gpu.section(found), ""]
    return "\n".join(lines)


def left_out(name: str, suffix: str, lines: Iterable[str], folder: Path = RESULTS) -> Iterator[str]:
    """The results of a section that none of its lines names."""
    text = "\n".join(lines)
    paths = sorted(folder.glob(f"{name}-*.{suffix}"))
    names = [path.name for path in paths if f"{path.name}`" not in text]
    if names:
        listed = ", ".join(f"`{each}`" for each in names)
        yield f"Earlier runs that are not shown, in the same folder: {listed}."
        yield ""


def host_bound(folder: Path = RESULTS) -> Iterator[str]:
    """What a GPU's ratio over float32 as it was run depends on, with the cases measured."""
    for path in latest("applied", folder=folder):
        head = head_of(path)
        if head["family"] in MACHINES and head["device"] == MACHINES[head["family"]]:
            cases = "; ".join(
                f"{row['task']} was said to be {times(row['claimed']['ratio'])} and found at "
                f"{times(row['applied']['ratio'])} on another host"
                for row in head["rows"]
            )
            yield (
                f"{head['device']}: at its own batch of 32 a step takes as long as the host needs "
                "to launch its kernels, so a ratio over float32 as it was run differs between "
                f"hosts with the same GPU ({cases}). At a batch that fills it, the GPU decides."
            )


def files() -> dict[Path, str]:
    """Everything that is made here: each file's text."""
    tables = {
        path: with_table(path.read_text(encoding="utf-8"), name, table())
        for path, (name, table) in TABLES.items()
    }
    return {PAGE: page(), PICTURE: picture(), **tables}


def with_table(text: str, name: str, table: Iterable[str]) -> str:
    """A page with this table between its marks."""
    begin, end = f"<!-- {name}: made by benchmarks.report -->", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"no place for the table {name!r}: expected {begin} and {end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([before + begin, *table, end + after])
