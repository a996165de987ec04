"""A Ray cluster on this machine, as a program: nodes of several types, each a raylet of its own.

`LocalCluster` starts it and asks it to add and remove nodes. Each node has its own temporary
folder, as machines have, and is shown the CPU of a recording (`tests/child_site/sitecustomize.py`).
Devices are pretended, so that everything tuned here is marked as a rehearsal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.processes import undisturbed

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "profiles" / "recordings"
OBJECT_STORE_BYTES = 80 * 2**20


class LocalCluster:
    """The program, and what can be asked of it; `folder` is a temporary one of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._sessions = tempfile.mkdtemp(prefix="r")  # short: paths of sockets have 107 bytes
        (Path(self._sessions) / "ray").mkdir()
        self._log = (folder / "cluster.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self.variables(),
        )
        self.address = ""
        self._recordings: dict[str, str] = {}

    def variables(self) -> dict[str, str]:
        """The environment of a process on this machine, the nodes' parts left out."""
        return {
            **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
            **undisturbed(),
            "RAY_TMPDIR": self._sessions,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "AUTOPREC_REHEARSAL": "1",
        }

    def nodes(self, recording: str) -> list[str]:
        """Return the nodes that are shown a recording's CPU."""
        return [name for name, shown in self._recordings.items() if shown == recording]

    def add(self, recording: str, *, cpus: int, gpus: int = 0, **variables: str) -> str:
        """Add a node, and return its name; the first becomes the head."""
        name = f"node-{len(list(self.folder.glob('node-*')))}"
        self._recordings[name] = recording
        place = self.folder / name
        place.mkdir()
        cpu = str(RECORDINGS / f"{recording}.json")
        environment = {"PRETENDED_CPU": cpu, "TMPDIR": str(place), "NODE": name, **variables}
        self.address = str(
            self._ask("add", name, {"num_cpus": cpus, "num_gpus": gpus}, environment)
        )
        return name

    def remove(self, name: str) -> None:
        """End a node's processes, as if the machine was switched off."""
        del self._recordings[name]
        self._ask("remove", name)

    def close(self) -> None:
        """End the cluster."""
        if self._process.poll() is None:
            self._process.stdin.close()  # type: ignore[union-attr]
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()
        shutil.rmtree(self._sessions, ignore_errors=True)

    def autoprec(
        self, *words: object, program: Sequence[str] = ("-m", "autoprec"), **variables: str
    ) -> subprocess.Popen[str]:
        """Start the command line, on a machine whose own CPU is not pretended."""
        return subprocess.Popen(
            [sys.executable, *program, *map(str, words)],
            env={**self.variables(), **variables},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self.folder / "cluster.log").read_text()
        return json.loads(answer)


def main() -> None:
    """Obey the lines on stdin until it closes."""
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints is no answer
    cluster, nodes = Cluster(shutdown_at_exit=True), {}
    for line in sys.stdin:
        what, name, *rest = json.loads(line)
        if what == "add":
            counts, environment = rest
            settings: dict[str, Any] = {**counts, "env_vars": environment}
            if not nodes:
                settings["include_dashboard"] = False
            nodes[name] = cluster.add_node(object_store_memory=OBJECT_STORE_BYTES, **settings)
        else:
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        answers.write(json.dumps(cluster.address) + "\n")
        answers.flush()
    cluster.shutdown()


if __name__ == "__main__":
    main()
