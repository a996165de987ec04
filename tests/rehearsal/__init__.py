"""A rehearsal of accelerators on a machine that has none: whole tunings on a pretended GPU.

Child processes of the tests are shown a GPU (CUDA, ROCm, XPU or MPS) whose tensors are computed on
the CPU: real numbers, the device's dispatch keys, and torch's own Python layer with its checks of
arguments. See `site/pretended/` for how.

What it proves: that tensors and modules are put where they belong; which dtypes the device's
autocast and promotion rules give, and what they refuse; that functions of torch.cuda, torch.xpu and
torch.mps are called with arguments that they take, in an order that works; that memory is counted,
limited and given back as the caching allocator does it; that nothing is read from a copy that has
not ended; that faults of a library end where they should.

What only hardware can show: speed; real streams and their order; the kernels' own numerics, limits
and missing dtypes; NCCL; torch.compile. No figure of speed from here means anything, and none is
shown: AUTOPREC_REHEARSAL marks what is tuned, and its profiles are refused anywhere else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import AUTOPREC, AUTOPREC_FORKING

from rehearsal.build import library
from tests.fork_server import ForkServer

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_GUARD = {"cuda": "CUDA", "rocm": "CUDA", "xpu": "XPU", "mps": "MPS"}
GIB = 2**30

#: Processes that have imported a framework and pretend nothing, by framework and guard.
_SERVERS: dict[tuple[str, str], ForkServer] = {}
_ONE_AT_A_TIME = threading.Lock()
_IMPORTED = (
    "autoprec.workers",
    "autoprec.core",
    "autoprec.backends.shared",
    "autoprec.cli",
    "autoprec.tuning",
)


def stop_servers() -> None:
    """End what the rehearsed processes were forked from."""
    while _SERVERS:
        _SERVERS.popitem()[1].stop()


#: How a program ends: torch's threads for a pretended device may abort a process that goes on.
_END = "import os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)"


@dataclass(frozen=True)
class Gpu:
    """One pretended GPU. `others_gib` is held by strangers, `hidden` is shown by NVML alone."""

    name: str
    capability: str = "9.0"
    gib: float = 4.0
    others_gib: float = 0.0
    hidden: bool = False
    pci: str = "56a0"
    processors: int = 132

    def values(self, number: int) -> dict[str, Any]:
        """What the pretended side reads."""
        return {
            "name": self.name,
            "capability": self.capability,
            "bytes": int(self.gib * GIB),
            "others": int(self.others_gib * GIB),
            "hidden": self.hidden,
            "pci": self.pci,
            "processors": self.processors,
            "uuid": f"GPU-{number:08d}-2222-3333-4444-555555555555",
        }


H100 = Gpu("NVIDIA H100 80GB HBM3")
T4 = Gpu("Tesla T4", capability="7.5", processors=40)
GPUS = {
    "cuda": H100,
    "rocm": Gpu("AMD Instinct MI300X", capability="9.4", processors=304),
    "xpu": Gpu("Intel(R) Arc(TM) A770 Graphics", capability="12.55", processors=512),
    "mps": Gpu("Apple M3 Max", capability="0.0", processors=40),
}


@dataclass(frozen=True)
class Rehearsal:
    """A machine with pretended GPUs; `folder` is a temporary one of its own.

    `faults` are mappings as `pretended.faults` reads them. NVML opens, or fails with the return
    code `nvml_error`; without `nvml` its library is missing and nothing shows the GPU. Where its
    GPUs are not `driven`, the frameworks are builds for CPUs. `float64` is by default what the kind
    has: MPS and Arc have none. Workers are forked where `forked` names their framework.
    """

    folder: Path
    kind: str = "cuda"
    gpus: Sequence[Gpu] = ()
    faults: Sequence[Mapping[str, Any]] = ()
    nvml: bool = True
    nvml_error: int = 0
    driven: bool = True
    float64: bool | None = None
    forked: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """The environment of a process on this machine."""
        books = self.folder / "books"
        books.mkdir(parents=True, exist_ok=True)
        gpus = [gpu.values(number) for number, gpu in enumerate(self.gpus or [GPUS[self.kind]], 1)]
        has_float64 = self.kind in ("cuda", "rocm") if self.float64 is None else self.float64
        given = {
            "kind": self.kind,
            "gpus": gpus,
            "faults": [dict(fault) for fault in self.faults],
            "nvml": self.nvml,
            "nvml_error": self.nvml_error,
            "float64": has_float64,
            "folder": str(books),
        }
        places = [str(_HERE / "site"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
        return {
            **{name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name},
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "AUTOPREC_REHEARSAL": "1",
            "REHEARSAL": json.dumps(given),
            "REHEARSAL_DRIVEN": str(int(self.driven)),
            "REHEARSAL_COUNT": str(sum(not gpu["hidden"] for gpu in gpus)),
            "REHEARSAL_GUARD": str(library()),
            "REHEARSAL_GUARD_KIND": _GUARD[self.kind],
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),
            **self.environment,
        }

    def python(self, code: str, *arguments: object, seconds: float = 120) -> str:
        """Run a program on this machine; return what it printed. It must end well."""
        done = self._fork("torch", f"{code}\n{_END}", *arguments, seconds=seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def autoprec(self, *words: object, seconds: float = 540) -> subprocess.CompletedProcess[str]:
        """Run the command line on this machine."""
        if self.forked and self.driven:
            return self._fork(self.forked, AUTOPREC_FORKING, *words, seconds=seconds)
        return self.run([*AUTOPREC, *map(str, words)], seconds=seconds)

    def _fork(
        self, framework: str, program: str, *words: object, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        variables = self.variables()
        with _ONE_AT_A_TIME:
            which = (framework, _GUARD[self.kind])
            if which not in _SERVERS:
                modules = (*_IMPORTED, f"autoprec.backends.{framework}")
                _SERVERS[which] = ForkServer(modules, {**variables, "REHEARSAL": ""})
            server = _SERVERS[which]
            assert server.pid
        script = _HERE / "forked.py"
        settings = {"seconds": seconds, "environment": variables, "folder": self.folder}
        return server.run(script, program, *words, **settings)

    def run(self, command: Sequence[str], *, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine; where it hangs, say what it had printed, and its stack."""
        with subprocess.Popen(
            command,
            env=self.variables() | {"PYTHONFAULTHANDLER": "1"},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)
                try:
                    out, err = process.communicate(timeout=30)
                finally:
                    process.kill()
                raise AssertionError(f"still running after {seconds:g} s:\n{out}\n{err}") from None
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)
