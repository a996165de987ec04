"""Where a result comes from: machine, versions and commit; and whether the code has changed since.

Git is asked, and may not be there: a copy without history, or a shallow one, knows no earlier
commit. Then nothing is claimed: what cannot be told is `UNKNOWN`.
"""

from __future__ import annotations

import ast
import json
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT

CURRENT, STALE, UNKNOWN = "current", "stale", "unknown"
DIRTY = "-dirty"


@dataclass(frozen=True)
class Subject:
    """The code that a result speaks of: `entries`, and what they import of `packages`."""

    entries: tuple[str, ...]
    packages: tuple[str, ...]


#: By benchmark. A backend is imported by its name at run time, so its surgeon is an entry. How the
#: overhead's seconds become intervals (`fit`, `compare`) is not the code that they speak of: it
#: moves no measured second, and has tests of its own.
SUBJECTS: dict[str, Subject] = {
    "replay": Subject(
        entries=("benchmarks/search/replay.py",),
        packages=("autoprec/core/speed",),
    ),
    "overhead": Subject(
        entries=(
            "benchmarks/overhead/torch_steps.py",
            "benchmarks/overhead/keras_steps.py",
            "autoprec/backends/keras/surgeon.py",
            "autoprec/backends/torch/surgeon.py",
        ),
        packages=(
            "autoprec/backends/keras/apply",
            "autoprec/backends/torch/apply",
            "autoprec/backends/torch/distributed",
        ),
    ),
}


def paths_of(subject: Subject, root: Path = ROOT) -> tuple[str, ...]:
    """The files whose change makes a result stale: found in the imports, none of it is loaded.

    Imports inside functions count. What lies outside the packages is neither kept nor followed.
    """
    found: set[str] = set()
    waiting = list(subject.entries)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            imported = _imported((root / path).read_text(encoding="utf-8"), root)
            waiting += [p for p in imported if str(Path(p).parent) in subject.packages]
    return tuple(sorted(found))


def _imported(source: str, root: Path) -> Iterator[str]:
    """The files of this checkout that a module imports."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            path = name.replace(".", "/")
            yield from (p for p in (f"{path}.py", f"{path}/__init__.py") if (root / p).is_file())


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
    state = staleness(measured, paths_of(SUBJECTS[name]))
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
