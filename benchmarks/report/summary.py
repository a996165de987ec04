"""The README's results: a row for each device measured, and one for Keras.

On every CPU the same model, in the newest tuning whose precision was timed by itself, else in the
newest one; on every GPU one of real size, for small ones keep no GPU busy. Of Keras the newest
tuning on any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoprec.core.dtypes import Policy
from benchmarks.checkout import RESULTS
from benchmarks.gpu.real_models import MODELS
from benchmarks.report import gpu
from benchmarks.report.real_gpu import NOT_YET
from benchmarks.report.search import SHOWN, tuned
from benchmarks.search.oracle_rows import NOT_MEASURED, Row, chosen, ratio_text

#: What the last column holds: everything that the chosen recipe changes.
OVERALL = "overall, with batch and settings"

#: The Keras model that is shown, and the model on GPUs.
KERAS, ON_GPU = "keras_conv", "gpt2"

NAMES = {
    SHOWN: "transformer encoder (PyTorch)",
    KERAS: "convolutions (Keras)",
    ON_GPU: f"{MODELS[ON_GPU].title} (PyTorch)",
}


def summary(folder: Path = RESULTS) -> Iterator[str]:
    """Yield the table, line by line."""
    columns = ("device", "model", "chosen", "precision alone, at the same batch", OVERALL)
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    gpus, on_gpu = gpu.read(folder), tuned(folder, ON_GPU)
    for device, rows in tuned(folder).items():
        task, own = (ON_GPU, on_gpu[device]) if device in gpus else (SHOWN, rows)
        timed_alone = [row for row in own if _alone(row)]
        yield _line(device, task, next(iter(timed_alone or own), None))
    of_keras = [(row, device) for device, rows in tuned(folder, KERAS).items() for row in rows]
    for row, device in sorted(of_keras, key=lambda each: str(each[0]["date"]))[-1:]:
        yield _line(device, KERAS, row)


def _line(device: str, task: str, row: Row | None) -> str:
    """Return a tuning's row; without one, that nothing was measured."""
    cells = [NOT_YET if task == ON_GPU else NOT_MEASURED] * 3
    if row is not None:
        cells = [chosen(row), _alone_text(row), ratio_text(row["chosen_over_float32"])]
    return f"| {' | '.join([device, NAMES[task], *cells])} |"


def _alone(row: Row) -> Mapping[str, Any] | None:
    """Return what precision brings with all else alike, where that was timed."""
    found: Mapping[str, Any] | None = row.get("chosen_over_float32_alike")
    return found


def _alone_text(row: Row) -> str:
    """Return what precision brings; nothing where float32 itself was chosen."""
    if row["recipes"]["chosen"]["policy"] == Policy.FLOAT32.value:
        return "none: float32 is the fastest"
    found = _alone(row)
    return NOT_MEASURED if found is None else ratio_text(found)
