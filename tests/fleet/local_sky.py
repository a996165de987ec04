"""SkyPilot's `sky`, and `rsync` from its clusters, as programs: a cluster is a folder here.

`sky launch` copies the working folder into the cluster's and runs the command there, with the
variables of its GPU. Only what docs/scale.md uses is understood.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.fleet.local_programs import play, variables, write_programs, write_variables


class LocalSky:
    """The programs, and the clusters that are up; `folder` is a temporary one of its own."""

    def __init__(self, folder: Path, gpus: Mapping[str, Mapping[str, str]]) -> None:
        self.folder = folder
        write_programs(folder, __file__, ("sky", "rsync"))
        write_variables(folder / "gpus", gpus)
        (folder / "clusters").mkdir()

    def variables(self) -> dict[str, str]:
        """Return what the environment of a command has besides."""
        return variables(self.folder)

    def clusters(self) -> list[str]:
        """Return the clusters that were not taken down."""
        return sorted(each.name for each in (self.folder / "clusters").iterdir())


def sky(cloud: Path, words: list[str]) -> int:
    """Launch a cluster, or take one down."""
    parser = argparse.ArgumentParser("sky")
    parts = parser.add_subparsers(dest="what", required=True)
    launch, down = parts.add_parser("launch"), parts.add_parser("down")
    launch.add_argument("-y", action="store_true", required=True)
    launch.add_argument("-c", dest="name", required=True)
    launch.add_argument("--gpus", required=True)
    launch.add_argument("--workdir", required=True)
    launch.add_argument("command")
    down.add_argument("-y", action="store_true", required=True)
    down.add_argument("name")
    given = parser.parse_args(words)
    cluster = cloud / "clusters" / given.name
    if given.what == "down":
        shutil.rmtree(cluster)
        return 0
    gpu, _, count = given.gpus.partition(":")
    if count != "1":
        parser.error("one GPU a node, please")
    given_there = json.loads((cloud / "gpus" / gpu).read_text())
    shutil.copytree(given.workdir, cluster / "sky_workdir", dirs_exist_ok=True)
    return subprocess.call(
        ["bash", "-c", given.command],
        cwd=cluster / "sky_workdir",
        env={**os.environ, **given_there},
    )


def rsync(cloud: Path, words: list[str]) -> int:
    """Copy a cluster's file to this machine."""
    option, source, target = words
    name, _, path = source.partition(":")
    if option != "-P":
        sys.exit(f"rsync: option {option} given")
    shutil.copy(cloud / "clusters" / name / path, target)
    return 0


if __name__ == "__main__":
    play(globals())
