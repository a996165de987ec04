"""Programs of a scheduler that is not here, played by functions of a module of these tests.

Each program calls its module with its own name; the function of that name gets the folder of what
is played, and the program's words.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_FOLDER = "LOCAL_PROGRAMS"


def write_programs(folder: Path, module: str, names: Sequence[str]) -> None:
    """Write the programs that the module (its `__file__`) plays."""
    (folder / "bin").mkdir(parents=True)
    for name in names:
        program = folder / "bin" / name
        called = shlex.join([sys.executable, module, name])
        program.write_text(f'#!/bin/sh\nexec {called} "$@"\n')
        program.chmod(0o755)


def write_variables(folder: Path, variables: Mapping[str, Mapping[str, str]]) -> None:
    """Write the variables of each kind of node, a file each."""
    folder.mkdir(parents=True)
    for name, given in variables.items():
        (folder / name).write_text(json.dumps(dict(given)))


def variables(folder: Path) -> dict[str, str]:
    """Return what the environment of a command that finds the programs has besides."""
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return {"PATH": path, _FOLDER: str(folder)}


def play(functions: Mapping[str, object]) -> None:
    """Run the function that the first word names, in a program that `write_programs` wrote."""
    function = functions[sys.argv[1]]
    assert callable(function)
    sys.exit(function(Path(os.environ[_FOLDER]), sys.argv[2:]))
