"""Does the tuner round the reduction of gradients where the link is slow, and only there?

A task on two ranks (benchmarks/ranks/slow_link.py) is tuned from scratch, over a simulated link
and without one, so many times each. Prints how often gradients were to travel in which dtype, and
writes every tuning as JSON.

    python -m benchmarks.search.reduce_dtype --times 10 --gigabytes 0.05
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoprec.api import tune
from autoprec.core.codec import to_plain
from autoprec.core.profile import Profile
from autoprec.yaml_files import write_text
from benchmarks.checkout import BENCHMARKS, RESULTS
from benchmarks.provenance import machine

TASK = BENCHMARKS / "ranks" / "slow_link.py"
LINK = "LINK_GB_PER_SECOND"
RANKS = 2
#: The proof is not what is measured here, so it follows training no further than this.
PROOF_STEPS = 60


def tuned(gigabytes: float | None, seed: int) -> Profile:
    """Tune from scratch over a link of this rate; None: without one."""
    os.environ.pop(LINK, None)
    if gigabytes is not None:
        os.environ[LINK] = str(gigabytes)
    with tempfile.TemporaryDirectory() as folder:
        return tune(
            TASK,
            device="cpu",
            nproc=RANKS,
            policies=("float32", "mixed_bfloat16"),
            output=Path(folder) / "ranks.yaml",
            storage=str(Path(folder) / "ranks.journal"),
            seed=seed,
            proof_steps=PROOF_STEPS,
            wait=True,
        )


def row(profile: Profile, gigabytes: float | None, seed: int, seconds: float) -> dict[str, Any]:
    evidence, ranks = profile.evidence, profile.recipe.distributed
    parts = {part.what: to_plain(part.speedup) for part in evidence.waterfall}
    return {
        "gigabytes_per_second": gigabytes,
        "seed": seed,
        "reduce_dtype": "" if ranks is None else ranks.reduce_dtype.value,
        "recipe": to_plain(profile.recipe),
        "speedup": to_plain(evidence.over_baseline),
        "parts": parts,
        "verdict": evidence.parity.verdict,
        "exposed_in_baseline": to_plain(evidence.baseline.exposed_communication),
        "exposed": to_plain(evidence.chosen.exposed_communication),
        "inconclusive": evidence.inconclusive,
        "seconds": round(seconds, 1),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--gigabytes", type=float, default=0.05, help="a second, of the slow link")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    head = machine()
    output = arguments.output or RESULTS / f"reduce_dtype-{head['date']}-{head['family']}.json"
    rows: list[dict[str, Any]] = []
    for seed in range(arguments.times):
        for gigabytes in (arguments.gigabytes, None):
            began = time.monotonic()
            profile = tuned(gigabytes, seed)
            rows.append(row(profile, gigabytes, seed, time.monotonic() - began))
            link = "no link" if gigabytes is None else f"{gigabytes:g} GB/s"
            print(f"{link}, seed {seed}: {rows[-1]['reduce_dtype']}", flush=True)
            write_text(output, json.dumps({**head, "rows": rows}, indent=1) + "\n")
    for gigabytes in (arguments.gigabytes, None):
        found = Counter(r["reduce_dtype"] for r in rows if r["gigabytes_per_second"] == gigabytes)
        link = "without a link" if gigabytes is None else f"over {gigabytes:g} GB/s"
        print(f"{link}: {', '.join(f'{n} x {dtype}' for dtype, n in found.most_common())}")


if __name__ == "__main__":
    main()
