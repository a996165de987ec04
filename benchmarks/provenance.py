"""Where a result comes from: machine, versions and commit; and whether the code has changed since.

Git is asked, and may not be there: a copy without history, or a shallow one, knows no earlier
commit. Then nothing is claimed: what cannot be told is `UNKNOWN`.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT

CURRENT, STALE, UNKNOWN = "current", "stale", "unknown"
DIRTY = "-dirty"

#: The code that a result speaks of, by benchmark: a change of it makes the result stale.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "replay": (
        "autoprec/core/speed/acquisition.py",
        "autoprec/core/speed/stopping.py",
        "autoprec/core/speed/cost_model.py",
        "autoprec/core/speed/trial_results.py",
        "autoprec/core/speed/keep_memory.py",
        "benchmarks/search/replay.py",
    ),
    "overhead": (
        "autoprec/backends/torch/apply/precision.py",
        "autoprec/backends/torch/apply/surgeon.py",
        "autoprec/backends/torch/apply/loss_scaler.py",
        "autoprec/backends/torch/apply/nonfinite_losses.py",
        "autoprec/backends/torch/apply/optimizer_steps.py",
        "autoprec/backends/keras/apply/precision.py",
        "autoprec/backends/keras/apply/surgeon.py",
        "autoprec/backends/keras/apply/train_function.py",
    ),
}


def git(*words: str, root: Path = ROOT) -> str | None:
    """What git says of this checkout; None where there is no git, no history, or an error."""
    try:
        said = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()


def commit(root: Path = ROOT) -> str:
    """The commit that is measured; with -dirty where autoprec/ differs from it."""
    changed = git("status", "--porcelain", "--", "autoprec", root=root)
    head = git("rev-parse", "--short", "HEAD", root=root)
    if changed is None or head is None:
        return UNKNOWN
    return head + (DIRTY if changed else "")


def staleness(measured: str | None, paths: Sequence[str], root: Path = ROOT) -> str:
    """Whether any of `paths` differs here from what it was at the commit that was measured.

    What was measured with changes that no commit holds can be shown to be current by nobody, so it
    is `UNKNOWN`, too.
    """
    if measured is None or measured == UNKNOWN or measured.endswith(DIRTY):
        return UNKNOWN
    if git("cat-file", "-e", f"{measured}^{{commit}}", root=root) is None:
        return UNKNOWN
    changed = git("diff", "--name-only", measured, "--", *paths, root=root)
    if changed is None:
        return UNKNOWN
    return STALE if changed else CURRENT


def staleness_in_words(name: str, found: Any) -> str:
    """A sentence for a table: of which commit it is, and whether its subject has changed since."""
    measured = found.get("commit") if isinstance(found, dict) else None
    state = staleness(measured, SUBJECTS[name])
    of = f"Measured at commit {measured}" if measured else "Measured at a commit that was not kept"
    means = {
        CURRENT: "what it speaks of has not changed since",
        STALE: "stale: what it speaks of has changed since, so measure it again",
        UNKNOWN: "stale or not is unknown",
    }
    return f"{of}; {means[state]}."


def machine(device: str = "cpu") -> dict[str, Any]:
    """What every result begins with: date, commit, device and versions."""
    from autoprec.api import probe

    seen = probe(device=device)
    facts = seen.devices[0].facts
    return {
        "date": today(),
        "commit": commit(),
        "device": facts.name,
        "family": facts.family,
        "python": platform.python_version(),
        **{framework.name: framework.version for framework in seen.frameworks},
    }


def today() -> str:
    """The date that results are named by."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
