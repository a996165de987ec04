"""The report's tables of models of real size on a GPU: a row a model, then every way to train it.

Published numbers stand beside ours with who published them: other software, often another GPU or
another layout, and said so. What was not measured is said to be so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoprec.core.dtypes import DType
from autoprec.core.number_words import percent, times
from benchmarks.gpu.real_models import MODELS
from benchmarks.search.oracle_rows import words

Rows = Sequence[Mapping[str, Any]]

NOT_YET = "not measured yet"
NO_FLOAT8 = "layers too narrow"
#: Behind a number that one of its own checks doubts.
DOUBTED = " (?)"

_LAMBDA = "[Lambda](https://github.com/lambdal/deeplearning-benchmark)"
_NVIDIA = "[NVIDIA](https://github.com/NVIDIA/DeepLearningExamples)"
_LLM_C = "[llm.c](https://github.com/karpathy/llm.c)"
_BUILD = "[build-nanogpt](https://github.com/karpathy/build-nanogpt)"
_TITAN = "[torchtitan](https://github.com/pytorch/torchtitan)"
_GUIDE = "[TensorFlow's guide](https://www.tensorflow.org/guide/mixed_precision)"

#: What others have published of the same model, or of the nearest one.
PUBLISHED: Mapping[str, str] = {
    "gpt2": f"35 ms at batch 16: 463,000 tokens/s a GPU of 8 H100 ({_LLM_C}); on an A100 about "
    f"1000 ms in float32, 333 in TF32, 300 in bfloat16, 130 compiled, 96 with fused attention "
    f"({_BUILD})",
    "resnet50": f"H100, contiguous: 1753-1898 images/s in TF32, 2616-2791 with AMP ({_LAMBDA}); "
    f"A100, channels_last: 2470 with AMP ({_NVIDIA})",
    "llama_blocks": f"Llama 3 8B on 8 H100: 1.16x by the compiler, 1.28x more by float8 ({_TITAN})",
    "bert_512": f"H100, SQuAD at 384 tokens: 408-437 texts/s in TF32, 812-877 with AMP ({_LAMBDA})",
    "bert_128": f"BERT-large on an A100: 317 texts/s in TF32, 580 with AMP ({_NVIDIA})",
    "imagenette": "V100, batch 512: 415 ms in float32, 377 ms in float16 (an article on mixed "
    "precision in R, 2020)",
    "mlp8192": f"Titan V: 12 µs a sample in float32, 4 µs in float16 ({_GUIDE})",
}

#: The columns of steps: how each is called, and whose rows it shows.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "float32, IEEE": ("float32 IEEE",),
    "float32 as PyTorch starts": ("float32",),
    "TF32": ("tf32",),
    "bfloat16": ("mixed_bfloat16", "mixed_bfloat16 channels_last"),
    "float16": ("mixed_float16", "mixed_float16 channels_last"),
    "bfloat16 compiled": ("mixed_bfloat16 compiled",),
}

NOTE = (
    "`make gpu-evidence`, data: `benchmarks/results/gpu_real-*.jsonl`; the models are in "
    "`benchmarks/gpu/real/`. A step is forward, backward, clipping where the task clips, and the "
    "optimizer, on batches that are on the GPU already, through `apply_profile`; ways take turns, "
    "each at least twice, and the median is shown. Two numbers in a cell are those of contiguous "
    "and of channels_last convolutions. PyTorch starts with IEEE float32 in matrix products and "
    "with TF32 in convolutions. The ratio is that of compiled bfloat16 over float32 as PyTorch "
    "starts at the same batch; the share is that of the peak that the same run measured of "
    "bfloat16 products, operations counted with attention as dense; memory is what PyTorch "
    "reserved, batches included. (?) marks what a check of its own row doubts."
)


def models(found: Mapping[str, Mapping[str, Rows]]) -> Iterator[str]:
    """A row for each GPU and model; without any GPU, one for each model that says so."""
    columns = ["GPU", "model", "at the same batch", *COLUMNS, "float8 compiled"]
    columns += ["share of peak", "`autoprec tune` chose", "published"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    measured = {device: pieces for device, pieces in found.items() if any_real(pieces)}
    for device, pieces in (measured or {"any": {}}).items():
        for task, model in MODELS.items():
            if not model.rounded:
                rows = pieces.get(f"real-{task}", ())
                title = f"{model.title}{_batch(rows)}"
                cells = [device, title, _ratio(rows), *(_step(rows, w) for w in COLUMNS.values())]
                cells += [_step(rows, ("float8 compiled",)) if model.float8 else NO_FLOAT8]
                cells += [_share(rows), _chosen(pieces.get(f"tune-{task}", ()))]
                yield f"| {' | '.join([*cells, PUBLISHED.get(task, '-')])} |"


def every_way(pieces: Mapping[str, Rows]) -> Iterator[str]:
    """What each way of each model took on one GPU, with the checks that doubt it."""
    if not any_real(pieces):
        return
    columns = ("model", "way", "step", "samples/s", "TFLOPS", "share of its peak", "memory")
    yield f"| {' | '.join([*columns, 'first step', 'doubts'])} |"
    yield "|---" * (len(columns) + 2) + "|"
    for task, model in MODELS.items():
        rows = pieces.get(f"real-{task}", ())
        for way in dict.fromkeys(row["way"] for row in rows if "way" in row):
            own = [row for row in rows if row.get("way") == way]
            yield f"| {' | '.join([model.title, way, *_way(own)])} |"
    yield ""


def any_real(pieces: Mapping[str, Rows]) -> bool:
    """Whether a model of real size was measured."""
    return any(name.startswith("real-") for name in pieces)


def is_real(task: str) -> bool:
    """Whether a task is one of real size."""
    return task in MODELS


def _ran(rows: Rows, way: str) -> Rows:
    return [row for row in rows if row.get("way") == way and "step_seconds" in row]


def _seconds(rows: Rows, way: str) -> float | None:
    """The median step of a way's visits."""
    own = [row["step_seconds"] for row in _ran(rows, way)]
    return statistics.median(own) if own else None


def _milliseconds(seconds: float) -> str:
    """A step with three significant digits: rows differ by less than the two of a sentence."""
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _doubt(rows: Rows) -> str:
    return DOUBTED if any(row.get("doubts") for row in rows) else ""


def _step(rows: Rows, ways: Sequence[str]) -> str:
    """The step of each of these ways that was measured."""
    if not rows:
        return NOT_YET
    said = []
    for way in ways:
        seconds = _seconds(rows, way)
        if seconds is not None:
            said.append(f"{_milliseconds(seconds)}{_doubt(_ran(rows, way))}")
        elif any(row.get("way") == way for row in rows):
            said.append("failed")
    return ", ".join(said) or NOT_YET


def _batch(rows: Rows) -> str:
    """The batch at which plain float32 was measured."""
    return next((f", batch {r['recipe']['batch_size']}" for r in _ran(rows, "float32")), "")


def _ratio(rows: Rows) -> str:
    """What compiled bfloat16 brings over float32 as PyTorch starts."""
    plain, best = (_seconds(rows, way) for way in ("float32", "mixed_bfloat16 compiled"))
    return NOT_YET if plain is None or best is None else times(plain / best)


def _share(rows: Rows) -> str:
    """The share of the measured peak that compiled bfloat16 reaches."""
    own = [r["peak_share"] for r in _ran(rows, "mixed_bfloat16 compiled") if r["peak_share"]]
    return percent(statistics.median(own)) if own else NOT_YET


def _chosen(rows: Rows) -> str:
    """What a tuning chose, in how many seconds."""
    if not rows:
        return NOT_YET
    if "recipe" not in rows[0]:
        return "failed"
    seconds = rows[0]["evidence"]["tuning_seconds"]
    return f"{words(rows[0]['recipe'])}, in {seconds:.0f} s"


def _way(rows: Rows) -> Iterator[str]:
    """One way's cells."""
    ran = [row for row in rows if "step_seconds" in row]
    if not ran:
        yield f"failed: {rows[0]['failed']}"
        yield from "-" * 6
        return
    median = {
        key: statistics.median(row[key] for row in ran)
        for key in ("step_seconds", "samples_per_second", "tflops", "peak_memory_bytes")
    }
    shares = [row["peak_share"] for row in ran if row["peak_share"]]
    visits = ", ".join(_milliseconds(row["step_seconds"]) for row in ran)
    yield visits
    yield f"{median['samples_per_second']:.4g}"
    yield f"{median['tflops']:.3g}"
    dtype = DType(ran[0]["dtype"]).value
    yield f"{percent(statistics.median(shares))} of {dtype}" if shares else "-"
    yield f"{median['peak_memory_bytes'] / 2**30:.1f} GiB"
    yield f"{max(row['first_step_seconds'] for row in ran):.1f} s"
    yield "; ".join(dict.fromkeys(doubt for row in ran for doubt in row["doubts"])) or "none"
