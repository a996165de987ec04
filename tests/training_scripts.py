"""A folder with a training script that counts its starts: what is tuned as it stands."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.workers.client import WorkerSettings
from autoprec.workers.runner import Runner
from autoprec.workers.task_source import read_source

#: What every script begins with: one line for each start, outside the script's own folder.
COUNTED = """
import os
with open(os.environ["AUTOPREC_STARTS"], "a") as starts:
    starts.write("started\\n")
"""

QUICK = TimingBudget(seconds=0.05, min_steps=2, max_steps=3)


class Project:
    """A script in a folder of its own, and workers that run it in there."""

    def __init__(self, folder: Path, text: str, **files: str) -> None:
        self.folder = folder / "project"
        self.folder.mkdir()
        self.starts = folder / "starts"
        self.script = self.folder / "train.py"
        self.script.write_text(COUNTED + textwrap.dedent(text), encoding="utf-8")
        for name, content in files.items():
            (self.folder / name).write_text(content, encoding="utf-8")
        self.before = self.files()

    def files(self) -> dict[str, bytes]:
        """Return what every file of the folder holds, but for Python's own cache."""
        found = (each for each in sorted(self.folder.rglob("*")) if "__pycache__" not in each.parts)
        return {
            str(each.relative_to(self.folder)): each.read_bytes() if each.is_file() else b""
            for each in found
        }

    def runner(self, *arguments: str, **how: Any) -> Runner:
        """Return a runner for the script with these arguments."""
        source = read_source(self.script, arguments=arguments, **how)
        environment = {"AUTOPREC_STARTS": str(self.starts), "CUDA_VISIBLE_DEVICES": ""}
        return Runner(WorkerSettings(source, environment=environment), None)

    @property
    def started(self) -> int:
        """Return how often the script was started."""
        return self.said.count("started")

    @property
    def said(self) -> list[str]:
        """Return what its starts wrote outside its folder, line by line."""
        return self.starts.read_text().splitlines() if self.starts.exists() else []

    def line(self, text: str) -> int:
        """Return the number of the first line that holds `text`."""
        lines = self.script.read_text("utf-8").splitlines()
        return next(number for number, line in enumerate(lines, 1) if text in line)
