"""Where things lie in this checkout, and the environment in which its programs start each other."""

from __future__ import annotations

import os
from pathlib import Path

BENCHMARKS = Path(__file__).parent
ROOT = BENCHMARKS.parent
TESTS = ROOT / "tests"

#: Other packages' frameworks, the simulated one among them, as if installed.
FRAMEWORKS = TESTS / "frameworks"

TASKS = BENCHMARKS / "tasks"
REAL_TASKS = BENCHMARKS / "gpu" / "real"
HOLDOUT = BENCHMARKS / "holdout"
ISLANDS = BENCHMARKS / "islands"
CURVES = BENCHMARKS / "curves"
RESULTS = BENCHMARKS / "results"


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with these variables, for a child that imports from here.

    This checkout comes first on PYTHONPATH, then its `FRAMEWORKS`.
    """
    path = [str(ROOT), str(FRAMEWORKS), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
