"""Fuzz the profile loader and the catalogue loader: how many inputs they bear, and how fast.

    python -m benchmarks.faults.fuzz --profiles 100000 --catalogue 10000

Half of the inputs are a valid file with one change. Whatever raises something other than autoprec's
own errors, takes too many calls for its length, or is accepted but does not read back is printed
and kept in --keep, and the exit code is 1. The same seed gives the same inputs. The
counts are written as JSON to --output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS, TESTS
from benchmarks.provenance import commit, today

sys.path.insert(0, str(TESTS))

from fuzz.mutation import (
    CatalogueReader,
    Findings,
    mutants,
    peak_memory,
    read_profile,
    valid_catalogues,
    valid_profiles,
)

from autoprec.hardware.catalogue import profiles_folder

_MOST_BYTES = 50_000_000


def fuzz(
    name: str, target: Callable[[str], str], valid: list[str], *, count: int, seed: int, keep: Path
) -> dict[str, Any]:
    """Run `count` mutants through a target, print what happened, and return it."""
    findings = Findings()
    largest = 0
    for text in valid:
        target(text)
    began = time.perf_counter()
    for index, text in zip(range(count), mutants(seed, valid), strict=False):
        findings.run(target, text)
        if index % 100 == 0:
            largest = max(largest, peak_memory(target, text))
    took = time.perf_counter() - began
    print(
        f"{name:10} {findings.inputs:8} inputs in {took:6.1f} s, {findings.accepted} accepted, "
        f"{len(findings.failures)} failures, at most {findings.most_calls} calls "
        f"({len(findings.dearest_input)} characters), most memory {largest / 1e6:.1f} MB"
    )
    for text, problem in findings.failures[:20]:
        place = keep / f"{name}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"
        place.write_bytes(text.encode("utf-8", "surrogatepass"))
        print(f"  {place}: {problem}")
    return {
        "name": name,
        "inputs": findings.inputs,
        "accepted": findings.accepted,
        "failures": [problem for _, problem in findings.failures],
        "most_calls": findings.most_calls,
        "most_bytes": largest,
        "seconds": took,
    }


def well(row: dict[str, Any]) -> bool:
    """Whether nothing failed and no input took too much memory."""
    return not row["failures"] and row["most_bytes"] < _MOST_BYTES


def main() -> int:
    """Fuzz both loaders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", type=int, default=100_000)
    parser.add_argument("--catalogue", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--output", type=Path, default=RESULTS / f"fuzz-{today()}.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        devices = profiles_folder() / "devices"
        rows = [
            fuzz(name, target, valid, count=count, seed=arguments.seed, keep=arguments.keep)
            for name, target, valid, count in (
                ("profiles", read_profile, valid_profiles(), arguments.profiles),
                (
                    "catalogue",
                    CatalogueReader(Path(folder)),
                    valid_catalogues(devices),
                    arguments.catalogue,
                ),
            )
        ]
    found = {"date": today(), "commit": commit(), "seed": arguments.seed, "rows": rows}
    arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(map(well, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
