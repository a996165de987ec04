"""What float32 islands cost in speed, on models large enough to gain from bfloat16.

Every task of benchmarks/islands/ breaks in plain bfloat16. `autoprec tune --policies
mixed_bfloat16` finds its islands; then float32, the mended recipe and plain bfloat16 (wrong, but
the yardstick) train in alternation at the same batch.

    python -m benchmarks.numerics.islands_speed
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoprec.api import probe, tune
from autoprec.backends.shared import matmul_timing
from autoprec.core.codec import to_plain
from autoprec.core.device.merging import with_measurements
from autoprec.core.dtypes import Policy
from autoprec.core.number_words import times
from autoprec.core.recipe import Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.workers.task_source import TaskSource
from benchmarks.checkout import ISLANDS, RESULTS
from benchmarks.interleaving import alternate
from benchmarks.provenance import machine


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """One task: its islands, and the three rates."""
    seen = probe(device="cpu")
    facts, names = seen.devices[0].facts, [framework.name for framework in seen.frameworks]
    facts = with_measurements(facts, matmul_timing.measure(facts, names))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        profile = tune(
            path,
            device="cpu",
            policies="mixed_bfloat16",
            extras=False,
            output=folder / "profile.yaml",
            storage=str(folder / "study.journal"),
        )
        target = Target(facts, {}, lambda known, _: known)
        job = TuningJob(TaskSource(path), target, Options(), lambda event: None)
        mended = replace(profile.recipe, forced=False)
        plain = replace(mended, float32_modules=())
        float32 = Recipe(batch_size=mended.batch_size, accumulation_steps=mended.accumulation_steps)
        rates = alternate(job, [float32, mended, plain], {}, rounds)
    found = profile.evidence.islands
    with_islands = paired_ratio(rates[mended.key()], rates[float32.key()])
    without = paired_ratio(rates[plain.key()], rates[float32.key()])
    return {
        "task": path.stem,
        "islands": list(mended.float32_modules),
        "trials": None if found is None else found.trials,
        "share_of_products": None if found is None else found.share_of_products_in_float32,
        "policy": str(Policy.MIXED_BFLOAT16),
        "mended_over_float32": to_plain(with_islands),
        "plain_over_float32": to_plain(without),
        "speed_up_kept": (with_islands.ratio - 1) / (without.ratio - 1),
    }


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    head = machine()
    output = arguments.output or RESULTS / f"islands-{head['date']}.json"
    rows = []
    print("task        islands                       products  mended  plain bf16  speed-up kept")
    for path in sorted(ISLANDS.glob("*.py")):
        row = measure(path, arguments.rounds)
        rows.append(row)
        share = row["share_of_products"]
        print(
            f"{row['task']:11s} {', '.join(row['islands']) or 'none':28s} "
            f"{'' if share is None else f'{share:.1%}':>9s} "
            f"{times(row['mended_over_float32']['ratio']):>7s} "
            f"{times(row['plain_over_float32']['ratio']):>11s} "
            f"{row['speed_up_kept']:14.0%}",
            flush=True,
        )
    output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
