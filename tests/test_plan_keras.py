"""A plan of a Keras task goes by what TensorFlow timed here, whatever PyTorch's kernels reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoprec.cli import main
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.dtypes import DType
from autoprec.measurement_cache import FOLDER_VARIABLE, TimedDevice, remember
from autoprec.probing import probe_here

pytestmark = pytest.mark.keras

TASK = """
import keras
import numpy as np

def build_model():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

def build_data(batch_size):
    x = np.ones((4 * batch_size, 16), "float32")
    return x, x[:, :1]
"""


@pytest.mark.parametrize("torch_is_faster", [True, False])
def test_products_of_another_framework_say_nothing(
    torch_is_faster: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "model.py").write_text(TASK, encoding="utf-8")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    machine = probe_here(device="cpu")
    rates = {"torch": 300.0 if torch_is_faster else 50.0}
    rates["tensorflow"] = 350.0 - rates["torch"]
    for name, rate in rates.items():
        products = (Product(DType.FLOAT32, gflops=100.0), Product(DType.BFLOAT16, gflops=rate))
        measured = Measurements(name, products, 20.0, date="2026-11-24")
        version = machine.software.get(name, "")
        remember(TimedDevice(machine.facts[0].fingerprint, name, version, measured))
    assert main(["tune", str(tmp_path / "model.py"), "--plan", "--device", "cpu", "--json"]) == 0
    proposal = json.loads(capsys.readouterr().out)["proposal"]
    candidates = [each["policy"] for each in proposal["candidates"]]
    assert ("mixed_bfloat16" in candidates) is not torch_is_faster
