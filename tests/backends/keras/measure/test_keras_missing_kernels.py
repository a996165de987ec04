"""What a build of TensorFlow may lack of a CPU's 16-bit products, as far as a setting tells."""

from __future__ import annotations

import pytest

from autoprec.backends.keras.backend import KerasBackend


@pytest.mark.parametrize(
    ("value", "device", "said"),
    [
        ("0", "cpu", True),
        ("False", "cpu", True),
        ("1", "cpu", False),
        (None, "cpu", False),
        ("0", "cuda:0", False),
    ],
)
def test_tensorflow_without_onednn_has_no_16_bit_products(
    monkeypatch: pytest.MonkeyPatch, value: str | None, device: str, said: bool
) -> None:
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    if value is not None:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", value)
    assert ("without oneDNN" in KerasBackend().missing_kernels(device)) is said
