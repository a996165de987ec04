"""On PYTHONPATH: shows autoprec the CPU of a recorded machine, in the processes of one Ray node.

The variable PRETENDED_CPU, set where a node is started, names a recording's file. Only the text of
/proc/cpuinfo is another; memory, software and everything that runs are this machine's.
"""

import importlib.abc
import importlib.util
import json
import os
import sys


class _Hook(importlib.abc.MetaPathFinder):
    """Puts the answer over Machine's once its module has been imported."""

    def find_spec(self, name, path, target=None):
        if name != "autoprec.hardware.machine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _install(module.Machine)

        spec.loader.exec_module = exec_module
        return spec


def _install(local):
    with open(os.environ["PRETENDED_CPU"], encoding="utf-8") as file:
        shown = json.load(file)["files"]["/proc/cpuinfo"]
    read = local.read
    local.read = lambda self, path: shown if path == "/proc/cpuinfo" else read(self, path)


if os.environ.get("PRETENDED_CPU"):
    sys.meta_path.insert(0, _Hook())
