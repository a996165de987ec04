"""On PYTHONPATH: changes autoprec in processes that no test starts itself, as a cluster's are.

No tuning there waits for other processes or times the device's matrix products. The variable
PRETENDED_CPU, set where a node of a cluster is started, names a recording's file; autoprec is shown
the CPU of the recorded machine there. Only the text of /proc/cpuinfo is another; memory, software
and everything that runs are this machine's.
"""

import importlib.abc
import importlib.util
import json
import os
import sys


def _wait_for_nobody(module):
    module.PATIENCE_SECONDS = 0.0


def _time_nothing(module):
    module.measure_device = lambda facts, software: facts


def _show_cpu(module):
    with open(os.environ["PRETENDED_CPU"], encoding="utf-8") as file:
        shown = json.load(file)["files"]["/proc/cpuinfo"]
    read = module.Machine.read
    module.Machine.read = lambda self, path: shown if path == "/proc/cpuinfo" else read(self, path)


#: What is changed in which module, once it has been imported.
_CHANGES = {"autoprec.tuning.job": _wait_for_nobody, "autoprec.probing": _time_nothing}
if os.environ.get("PRETENDED_CPU"):
    _CHANGES["autoprec.hardware.machine"] = _show_cpu


class _Hook(importlib.abc.MetaPathFinder):
    """Makes the changes."""

    def find_spec(self, name, path, target=None):
        change = _CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Hook())
