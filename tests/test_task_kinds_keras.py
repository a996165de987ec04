"""Keras tasks as people write them that a tuning could misread, by public calls alone."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import remember_products

from autoprec import verify
from autoprec.cli import main
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.recipe import Recipe
from autoprec.measurement_cache import FOLDER_VARIABLE
from autoprec.profiles import load_profile
from autoprec.tuning.flow import verification

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

#: A task of images, series or vectors; `layers` is what its model is made of.
TASK = """
import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
{before}

def build_model():
    model = keras.Sequential([{layers}])
    model.compile(keras.optimizers.SGD({rate}), {loss!r})
    return model

def build_data(batch_size):
    draws = np.random.default_rng(0)
    for step in range({batches}):
        x = draws.normal(size=(batch_size, {shape})).astype("float32")
        yield x, {targets}

{after}
"""
VECTORS = {
    "before": "",
    "layers": "keras.Input((16,)), layers.Dense(32, 'relu'), layers.Dense(1)",
    "rate": 0.05,
    "loss": "mse",
    "batches": 40,
    "shape": "16",
    "targets": "x[:, :1]",
    "after": "BATCH_SIZE = 16",
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Write a task of these parts."""

    def write(**parts: Any) -> Path:
        path = tmp_path / "model.py"
        path.write_text(TASK.format(**{**VECTORS, **parts}), encoding="utf-8")
        return path

    monkeypatch.chdir(tmp_path)
    yield write
    sys.modules.pop("train", None)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a task's plan on a device, as the command prints it for programs."""

    def plan(task: Path, device: str = "cpu", *words: str) -> Any:
        assert main(["tune", str(task), "--plan", "--device", device, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return plan


# Proofs ------------------------------------------------------------------------------------------

#: Draws without Keras, in the dtype of what it is given.
NOISY = """
def DRAW(zeros):
    return np.random.normal(size=zeros.shape).astype("float32")

class Noisy(layers.Layer):
    def call(self, x, training=False):
        return tf.nn.dropout(x, 0.5) + tf.reshape({noise}, (-1, 64)) if training else x
"""

#: Data that every call of `build_data` goes on with.
DATA = """
def endless():
    draws = np.random.default_rng(0)
    while True:
        x = draws.normal(size=(16, 16)).astype("float32")
        yield x, x[:, :1]

class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = np.random.default_rng(index).normal(size=(16, 16)).astype("float32")
        return x, x[:, :1]

DATA = {data}

def build_data(batch_size):
    return DATA
"""


@pytest.fixture
def verified(
    write: Callable[..., Path],
    write_profile: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[str, str]]:
    """Verify a profile that says "equal" of a task: whether that holds, and the new reason.

    Speeds are left out: they are measured alike whatever the task.
    """
    monkeypatch.setattr(verification, "_time_again", lambda *_: ())

    def run(steps: int = 12, **parts: Any) -> tuple[str, str]:
        task = write(**parts)
        profile = load_profile(write_profile(Recipe(Policy.MIXED_BFLOAT16, 16), "keras"))
        stated = Verdict("equal", "trains like float32", steps=steps, most_steps=steps)
        profile = replace(profile, evidence=replace(profile.evidence, parity=stated))
        found = verify(profile, task, device="cpu")
        (numerics,) = [each.result for each in found.claims if each.name == "numerics"]
        assert found.parity is not None
        return numerics, found.parity.reason

    return run


@pytest.mark.parametrize(
    "noise",
    [
        "tf.zeros_like(x)",
        "tf.random.normal(tf.shape(x), dtype=x.dtype)",
        "0.3 * tf.random.shuffle(x)",
        "tf.one_hot(tf.random.categorical(tf.zeros((16, 64)), 1), 64, dtype=x.dtype)[:, 0]",
        "tf.cast(tf.random.uniform(tf.shape(x), -1, 2, tf.int32), x.dtype)",
        "0.3 * tf.cast(tf.random.gamma((16,), tf.ones((64,))), x.dtype)",
        "0.3 * tf.cast(tf.random.poisson((16,), tf.ones((64,))), x.dtype)",
        "tf.cast(0.3 * np.random.normal(size=x.shape[1:]), x.dtype)",
        "tf.cast(tf.numpy_function(DRAW, [tf.zeros((64,))], tf.float32), x.dtype)",
    ],
    ids=["dropout", "noise", "shuffle", "categorical", "whole", "gamma", "poisson", "once", "host"],
)
def test_own_random_numbers_of_tensorflow_are_no_drift(
    noise: str, verified: Callable[..., Any]
) -> None:
    layers = "keras.Input((16,)), layers.Dense(64, 'relu'), Noisy(), layers.Dense(1)"
    result, reason = verified(before=NOISY.format(noise=noise), layers=layers)
    assert result == "holds", reason


@pytest.mark.parametrize("data", ["endless()", "Pieces(workers=2)"])
def test_data_that_a_task_hands_out_again_serve_every_run(
    data: str, verified: Callable[..., Any]
) -> None:
    result, reason = verified(after=DATA.format(data=data))
    assert result == "holds", reason


ZERO = {
    "layers": "keras.Input((2,)), layers.Dense(2, use_bias=False)",
    "shape": "2",
    "targets": "np.zeros((batch_size, 2), 'float32')",
    "rate": 0.5,
}


#: Goes far from zero and back: bfloat16 gives whole numbers.
FAR = """
class Far(layers.Layer):
    def call(self, x):
        return (x + 256.0) - 256.0
"""


def test_losses_that_end_near_zero_are_told_as_such(verified: Callable[..., Any]) -> None:
    result, reason = verified(30, **ZERO)
    assert result == "holds", reason
    assert "both end below" in reason


def test_an_error_that_stays_where_the_loss_falls_to_zero_is_a_break(
    verified: Callable[..., Any],
) -> None:
    far = {"before": FAR, "layers": "keras.Input((2,)), Far(), layers.Dense(2)"}
    result, reason = verified(30, **{**ZERO, **far, "targets": "x"})
    assert result == "fails", reason


def test_steps_without_learning_say_so(verified: Callable[..., Any]) -> None:
    result, reason = verified(rate=0.0)
    assert result == "holds"
    assert "the loss did not fall in these steps" in reason


# Tunings and their pages --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tuning_and_its_page_tell_what_was_compared_and_what_limits_a_step(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "timed"))
    remember_products("tensorflow")
    task, own = write(**ZERO), ("--storage", str(tmp_path / "study.journal"), "--report")
    only = ("--device", "cpu", "--policies", "mixed_bfloat16", "--batch-sizes", "16")
    quick = ("--trials", "2", "--rounds", "1", "--proof-steps", "30", "--no-extras")
    assert main(["tune", str(task), *only, *quick, *own]) == 0
    evidence = load_profile(tmp_path / "model.profile.yaml").evidence
    page = html.unescape((tmp_path / "model.report.html").read_text(encoding="utf-8"))
    assert "both end below" in evidence.parity.reason
    assert "both end below" in page
    chosen = evidence.chosen
    assert chosen.peak_share is not None
    assert chosen.peak_share < 0.5  # a step of so small a model is something else
    assert chosen.bound not in ("arithmetic", "memory", "")
    assert chosen.bound in page


def test_a_small_network_on_a_large_gpu_is_bound_by_launches(
    write: Callable[..., Path], plan: Callable[..., Any]
) -> None:
    convolutions = "layers.Conv2D(8, 3), layers.Conv2D(16, 3), layers.Flatten(), layers.Dense(1)"
    task = write(
        layers=f"keras.Input((28, 28, 1)), {convolutions}", shape="28, 28, 1", targets="x[:, 0, 0]"
    )
    planned = plan(task, "v100")
    for each in planned["estimates"]:
        assert each["launch_seconds"] > each["arithmetic_seconds"] + each["memory_seconds"]
    (said,) = planned["expectation"]
    assert "nothing is to be expected" in said
    assert "launching" in said


# Models of one batch size -------------------------------------------------------------------------

STATEFUL = "keras.Input(batch_shape=(16, 5, 3)), layers.{layer}, layers.Dense(1)"
CONTRASTIVE = """
def own_loss(y, z):
    logits = tf.matmul(z, z, transpose_b=True)
    labels = tf.constant(np.eye(16, dtype="float32"))
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))
"""


@pytest.mark.parametrize(
    "parts",
    [
        {
            "layers": STATEFUL.format(layer="Bidirectional(layers.GRU(4, stateful=True))"),
            "shape": "5, 3",
            "targets": "x[:, 0, :1]",
        },
        {
            "before": CONTRASTIVE,
            "after": "BATCH_SIZE = 16\nbuild = build_model\n"
            "def build_model():\n"
            "    model = build()\n"
            "    model.compile('sgd', own_loss)\n"
            "    return model",
        },
    ],
    ids=["stateful", "labels of one length"],
)
def test_a_model_of_one_batch_size_has_a_plan_at_that(
    parts: dict[str, Any], write: Callable[..., Path], plan: Callable[..., Any]
) -> None:
    assert plan(write(**parts))["facts"]["splittable"] is False


# Operations by layer ------------------------------------------------------------------------------

CALLS_DIRECTLY = """
class Wrapped(layers.Layer):
    def __init__(self):
        super().__init__()
        self.inner, self.small = layers.Dense(60), layers.Dense(64)

    def build(self, shape):
        self.inner.build(shape)
        self.small.build((shape[0], 60))

    def call(self, x):
        return self.small.call(self.inner.call(x)[:, :8])
"""


@pytest.mark.parametrize(
    ("before", "wide"),
    [
        ("", "layers.TimeDistributed(layers.Dense(60))"),
        (CALLS_DIRECTLY, "Wrapped()"),
    ],
    ids=["TimeDistributed", "direct calls"],
)
def test_products_of_inner_layers_are_theirs_and_padding_them_is_planned(
    before: str, wide: str, write: Callable[..., Path], plan: Callable[..., Any]
) -> None:
    layers = f"keras.Input((64, 64)), {wide}, layers.Flatten(), layers.Dense(64)"
    task = write(before=before, layers=layers, shape="64, 64", targets="x[:, 0]")
    alignments = plan(task, "v100")["space"]["alignments"]
    assert [each["multiple"] for each in alignments] == [1, 8]


# Short batches first ------------------------------------------------------------------------------


ATTENDING = """
class Attending(layers.Layer):
    def call(self, x):
        return layers.Attention()([x, x])
"""


@pytest.mark.parametrize(
    ("between", "longest"),
    [("layers.TimeDistributed(layers.Dense(32))", 50), ("Attending()", 200)],
    ids=["dense", "pairs"],
)
def test_the_memory_that_is_planned_is_the_longest_batches(
    between: str, longest: int, write: Callable[..., Path], plan: Callable[..., Any]
) -> None:
    """Where every place meets every other, one kernel's operands outgrow what is kept."""
    layers = f"keras.Input((None, 4)), {between}, layers.Dense(1)"

    def planned(length: str) -> Any:
        task = write(before=ATTENDING, layers=layers, shape=f"{length}, 4", targets="x[:, :, :1]")
        return plan(task)["memory"]["bytes_per_sample"]

    most = planned(str(longest))
    assert planned(f"{longest} if step > 35 else 5") == pytest.approx(most, rel=0.02)


# The script's own apply_profile -------------------------------------------------------------------

TRAIN = """
import keras
from autoprec import apply_profile

{top}

def make_model():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    {inside}
    return model
"""


@pytest.mark.parametrize(
    ("top", "inside"),
    [
        ("precision = apply_profile('not_yet.profile.yaml')", ""),
        ("", "apply_profile('not_yet.profile.yaml', model=model)"),
    ],
    ids=["for all models", "for the model"],
)
def test_a_task_of_a_script_that_applies_its_profile_is_planned_before_there_is_one(
    top: str, inside: str, write: Callable[..., Path], plan: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(top=top, inside=inside))
    task = write(after="from train import make_model as build_model")
    assert plan(task)["facts"]["parameters"] == 16 * 8 + 8 + 8 + 1
