"""The tasks of benchmarks/gpu/real/, loaded as a worker loads them, at either size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoprec.backends.protocol import Task
from autoprec.workers.task_file import load_task
from benchmarks.checkout import REAL_TASKS

#: What the tasks share; everything else in the folder is a task.
SHARED = ("synthetic_data", "transformer_blocks", "bert_masked_words")
NAMES = sorted({path.stem for path in REAL_TASKS.glob("*.py")} - {*SHARED})


@contextmanager
def forgotten() -> Iterator[None]:
    """Forget the modules that are loaded inside, and what their loading does to the process."""
    path, arguments = list(sys.path), list(sys.argv)
    try:
        yield
    finally:
        sys.path[:], sys.argv[:] = path, arguments
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").parent == REAL_TASKS:
                del sys.modules[name]


@contextmanager
def loaded(name: str) -> Iterator[Task]:
    """A task at the size that the environment says."""
    with forgotten():
        yield load_task(REAL_TASKS / f"{name}.py")
