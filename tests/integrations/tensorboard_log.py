"""Reads a TensorBoard log with TensorBoard's own reader, in a process of its own.

The reader imports TensorFlow where it is installed, which tests with PyTorch must not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def read_log(folder: Path) -> tuple[dict[str, float], str]:
    """Return the scalars by name, and the profile's text."""
    printed = subprocess.run(
        [sys.executable, __file__, folder], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    scalars, text = json.loads(printed)
    return scalars, text


def _read(folder: str) -> tuple[dict[str, float], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    log = EventAccumulator(folder)
    log.Reload()
    scalars = {name: log.Scalars(name)[-1].value for name in log.Tags()["scalars"]}
    text = ""
    for name in log.Tags()["tensors"]:
        array = make_ndarray(log.Tensors(name)[-1].tensor_proto)
        if name.startswith("autoprec/profile"):
            text = array.reshape(-1)[0].decode("utf-8")
        else:
            scalars[name] = float(array)
    return scalars, text


if __name__ == "__main__":
    print(json.dumps(_read(sys.argv[1])))
