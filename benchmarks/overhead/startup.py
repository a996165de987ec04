"""Times what a user waits for before anything happens: `--help`, `probe`, `import autoprec`.

    python -m benchmarks.overhead.startup [--rounds 15]

Each command runs in a fresh process; the commands take turns round by round, so that all of them
meet the same machine. Python's own start is timed with them: it is in every number. The first
round, which reads files from the disk, is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from autoprec.yaml_files import write_text
from benchmarks.checkout import RESULTS
from benchmarks.provenance import machine

COMMANDS = {
    "python itself": ["-c", "pass"],
    "import autoprec": ["-c", "import autoprec"],
    "autoprec --help": ["-m", "autoprec", "--help"],
    "autoprec probe": ["-m", "autoprec", "probe"],
}
LIMITS = {"autoprec --help": 0.2, "autoprec probe": 0.5}  # seconds, promised


def seconds_of(arguments: list[str]) -> float:
    """Run Python with `arguments` in a new process; return how long it took."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return median and quartiles of each command over `rounds` alternating rounds."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            taken[name].append(seconds_of(arguments))
    summary = {}
    for name, (_, *seconds) in taken.items():
        low, _, high = quantiles(seconds, n=4)
        summary[name] = {"median": median(seconds), "low": low, "high": high}
    return summary


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, store, and say which promises are broken."""
    parser = argparse.ArgumentParser(description="Time the start of autoprec's commands.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    if arguments.rounds < 2:
        parser.error("--rounds: at least 2 are needed for a spread")

    head = machine()
    summary = measure(arguments.rounds)
    output = arguments.output or RESULTS / f"startup-{head['date']}-{head['family']}.json"
    found = {**head, "rounds": arguments.rounds, "commands": summary}
    write_text(output, json.dumps(found, indent=1) + "\n")
    print(f"{'':18}{'median':>9}{'quartiles':>22}{'promised':>12}")
    for name, row in summary.items():
        spread = f"{row['low'] * 1e3:.0f} to {row['high'] * 1e3:.0f} ms"
        limit = f"< {LIMITS[name] * 1e3:.0f} ms" if name in LIMITS else ""
        print(f"{name:18}{row['median'] * 1e3:>6.0f} ms{spread:>22}{limit:>12}")
    broken = [name for name, limit in LIMITS.items() if summary[name]["median"] > limit]
    for name in broken:
        print(f"{name}: slower than promised", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
