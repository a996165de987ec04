"""Builds guard.cpp once, with the compiler that torch.compile needs too."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import threading
from pathlib import Path

_ONE_AT_A_TIME = threading.Lock()
SOURCE = Path(__file__).with_name("guard.cpp")


def library() -> Path:
    """The shared library; built where it is not there already.

    It is kept in build/ under a name that its source and torch's version decide. Threads and
    processes may ask for it at the same time.
    """
    with _ONE_AT_A_TIME:
        return _library()


def _library() -> Path:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise RuntimeError(
            "the rehearsal of accelerators needs a C++ compiler, as torch.compile does; install "
            "g++ or clang++, or name one in CXX"
        )
    mark = hashlib.blake2b(SOURCE.read_bytes(), digest_size=8)
    mark.update(importlib.metadata.version("torch").encode())
    folder = Path(__file__).parents[2] / "build/rehearsal"
    built = folder / f"guard-{mark.hexdigest()}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *_flags(), "-o", partial], check=True, timeout=240)
        partial.replace(built)
    return built


def _flags() -> list[str | Path]:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    places = [f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
    libraries = ["-lc10", "-ltorch_cpu"]
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w"]
    return [*options, *places, SOURCE, *libraries]
