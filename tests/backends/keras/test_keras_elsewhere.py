"""Keras on torch, several replicas, and hardware that this machine does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.devices import placed_on
from autoprec.backends.keras.measure.session import KerasSession
from autoprec.errors import UsageError

HERE = Path(__file__).parent


def run(script, **environment):
    root = str(HERE.parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / script)],
        env={**os.environ, "PYTHONPATH": root, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all of it held" in done.stdout


def test_keras_on_torch():
    run("on_torch.py", KERAS_BACKEND="torch")


def test_gpus_and_tpus_are_listed_best_first(monkeypatch):
    present = {"TPU": ["TPU:0"], "GPU": ["GPU:0"], "CPU": ["CPU:0"]}
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: present.get(kind, []))
    assert list(KerasBackend().devices()) == ["tpu", "cuda", "cpu"]


def test_a_tpu_is_reached_by_its_local_name_and_its_scope_entered(monkeypatch):
    calls = []

    @contextmanager
    def scope():
        calls.append("scope")
        yield

    def resolver(tpu):
        calls.append(tpu)
        return "resolver"

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", resolver)
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", calls.append)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", calls.append)
    monkeypatch.setattr(
        tf.distribute, "TPUStrategy", lambda found: SimpleNamespace(scope=scope, found=found)
    )
    with placed_on("tpu"):
        pass
    assert calls == ["local", "resolver", "resolver", "scope"]


def test_an_unknown_device_is_refused():
    with (
        pytest.raises(UsageError, match="expected one of cpu, cuda, tpu"),
        placed_on("npu"),
    ):
        pass


def test_gpu_memory_is_asked_of_tensorflow(monkeypatch):
    asked = []
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", asked.append)
    monkeypatch.setattr(
        tf.config.experimental, "get_memory_info", lambda device: {"current": 1, "peak": 12345}
    )
    session = object.__new__(KerasSession)
    session._device = "cuda"
    session._reset_peak()
    assert session._peak() == 12345
    assert asked == ["GPU:0"]
