"""Explains the keys of a profile to its readers, by comments next to the keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

HEADER = """\
# Written by autoprec. apply_profile does what `recipe` says; `device` and `software` are what it
# holds for (compare: autoprec check FILE), and `evidence` is what was measured, memory in bytes.
"""

_COMMENT_COLUMN = 44

_COMMENTS = {
    "task.sha256": "of its code and of the modules next to it; comments do not count",
    "task.arguments": "those that the script or the function was tuned with",
    "task.at": "which of the script's calls that train; null: it is no script",
    "device.fingerprint": "what a profile is matched by",
    "device.fingerprint.core_quota": "CPU time a container may have, in processors; null: all",
    "device.fingerprint.partition": "of a divided GPU (MIG); '': a whole device",
    "device.fingerprint.rehearsal": "true: the device was only pretended, nothing was timed",
    "recipe.batch_size": "samples that go through the model at once (a micro-batch)",
    "recipe.accumulation_steps": "micro-batches whose gradients make one update",
    "recipe.float32_modules": "modules that stay in float32, by path",
    "recipe.alignment": "matrix dimensions of these modules are padded to a multiple",
    "recipe.loss_scale": "of float16: keeps small gradients from becoming 0",
    "recipe.loss_scale.floor": "the scale is not halved below this",
    "recipe.loss_scale.growth_interval": "good steps after which the scale is doubled",
    "recipe.compile": "torch.compile, or XLA (jit_compile) in Keras",
    "recipe.knobs": "further settings that were measured to pay",
    "recipe.knobs.keep_memory": "memory that a step frees stays with the process for the next one",
    "recipe.knobs.implicit_bfloat16": "oneDNN computes float32 products in bfloat16",
    "recipe.distributed": "how the ranks (one process a device) share a step",
    "recipe.distributed.reduce_dtype": "what gradients travel between ranks in",
    "recipe.distributed.param_dtype": "what FSDP2 gathers parameters in; null: as they are",
    "recipe.distributed.bucket_mb": "gradients that DDP reduces together",
    "recipe.forced": "true: float32 was not among the --policies asked for",
    "evidence.baseline": "plain float32 as you would run it",
    "evidence.baseline.weights_in": "the task's own dtype: this baseline is not float32",
    "evidence.baseline.convolutions_in": "what its convolutions ran in, by PyTorch's default",
    "evidence.baseline.exposed_communication": "share of its step that waits for other ranks",
    "evidence.chosen": "this recipe",
    "evidence.chosen.exposed_communication": "share of its step that waits for other ranks",
    "evidence.chosen.peak_share": "of the measured rate of matrix products, what a step reaches",
    "evidence.chosen.memory_share": "of the measured memory bandwidth, what a step needs at least",
    "evidence.chosen.bound": "what explains at least half of a step's time, or unknown",
    "evidence.chosen.data_seconds": "the loader's own time for a step",
    "evidence.chosen.warmup_seconds": "until steps were as fast as they stay",
    "evidence.chosen.break_even_steps": "steps after which compilation has paid for itself",
    "evidence.speedup": "over float32 at the same batch, in turns; low to high: 95 % interval",
    "evidence.throughput": "samples/s over those of the baseline's batch, which is another",
    "evidence.present": "over what you train with already, at the baseline's batch (--baseline)",
    "evidence.batch": "the second answer: what is known of the batch, in samples of an update",
    "evidence.batch.yours": "BATCH_SIZE, or where the search began",
    "evidence.batch.knee": "the smallest within 2 % of the most samples/s that the loader feeds",
    "evidence.batch.fits": "the largest that was tried and ran",
    "evidence.batch.loader_feeds": "samples/s",
    "evidence.batch.noise_scale": "the gradient's, in samples; later in training it is larger",
    "evidence.waterfall": "the parts of the speed-up, one thing after another switched off",
    "evidence.not_covered": "what a limit of time or trials left out",
    "evidence.parity": "how close to float32 it trains",
    "evidence.parity.step": "where that was seen",
    "evidence.parity.loss_deviation": "largest of the loss at the same weights, relative",
    "evidence.parity.gradient_error": "largest of the gradient at the same weights, relative",
    "evidence.parity.loss_null": "loss_deviation of float32 with a little noise on its weights",
    "evidence.parity.gradient_null": "gradient_error of float32 with that noise",
    "evidence.parity.trajectory_deviation": "of the loss after a short training, relative",
    "evidence.parity.trajectory_ratio": "all along it, over that of float32 with the noise",
    "evidence.parity.metric": "evaluate(model) after a short training",
    "evidence.parity.metric_reference": "the same in float32",
    "evidence.parity.skipped_steps": "because of an overflow",
    "evidence.parity.covered": "what was compared with float32",
    "evidence.parity.not_covered": "what was not",
    "evidence.parity.steps": "how far training was followed",
    "evidence.parity.most_steps": "how far it might have been: --proof-steps repeats it",
    "evidence.parity.trained_batch": "the batch of its trainings: a step of its own is slow",
    "evidence.parity.first_loss": "float32's, at the first step",
    "evidence.parity.last_loss": "float32's, in the last fifth of the steps",
    "evidence.parity.loss_origin": "a loss counts from here where shares of it are told",
    "evidence.checkpoint": "weights that training began with: they, too, are what was checked",
    "evidence.trials": "recipes that were measured",
    "evidence.tried": "each of them, by a short timing: the ratios above are surer",
    "evidence.parity.curves": "mean losses up to these steps, of one seed",
    "evidence.proof_seconds": "of the tuning, what checks took",
    "evidence.memory_budget_bytes": "what a trial was allowed",
    "evidence.refusals": "what was ruled out, and why",
    "evidence.loss_scale": "how it was found, in exponents of two",
    "evidence.islands": "how the modules that stay in float32 were found",
    "evidence.padding": "dimensions that are not multiples of what the device wants",
}

_KEY_LINE = re.compile(r"( *)([A-Za-z0-9_]+):(?: +(\S.*))?$")

#: A value that ends on its line: a number, a word without quotes, or what is empty.
_ONE_LINE_VALUE = re.compile(r"[-+.\w]+|\[\]|\{\}|''")


def with_comments(text: str) -> str:
    """Return a profile's YAML with a comment next to each key that has one."""
    return "".join(f"{line}\n" for line in _commented_lines(text))


def _commented_lines(text: str) -> Iterator[str]:
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        key_line = _KEY_LINE.fullmatch(line)
        if key_line is None:
            yield line
            continue
        indent, name, value = len(key_line[1]), key_line[2], key_line[3]
        path = [*((at, key) for at, key in path if at < indent), (indent, name)]
        comment = _COMMENTS.get(".".join(key for _, key in path))
        if comment is None or (value is not None and not _ONE_LINE_VALUE.fullmatch(value)):
            yield line
        else:
            yield f"{line:<{_COMMENT_COLUMN}}  # {comment}"
