"""Snapshots, noise on weights, and the error of gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoprec.backends.torch.train.model_state import (
    add_noise,
    buffer_values,
    gradient_error,
    gradients,
    restore_snapshot,
    take_snapshot,
)
from tests.backends.torch.traced import model

pytestmark = pytest.mark.torch


def test_a_snapshot_holds_weights_and_buffers_and_comes_back():
    net = model()
    kept = take_snapshot(net)
    net(torch.randn(4, 6))
    add_noise(net, 1)
    changed = take_snapshot(net)
    assert any(not torch.equal(kept[name], changed[name]) for name in kept)
    largest = max(float((changed[n] / kept[n] - 1).abs().nan_to_num().max()) for n in ("0.weight",))
    assert 0 < largest <= 2.0**-9 * 1.001
    restore_snapshot(net, kept)
    assert all(torch.equal(kept[name], tensor) for name, tensor in take_snapshot(net).items())


def test_noise_is_the_same_whatever_device_a_task_made_the_default():
    plain, noisy = nn.Linear(3, 2), nn.Linear(3, 2)
    noisy.load_state_dict(plain.state_dict())
    add_noise(plain, 7)
    with torch.device("meta"):
        add_noise(noisy, 7)
    assert torch.equal(plain.weight, noisy.weight)


def test_gradient_errors():
    g = {"a": torch.ones(4)}
    assert gradient_error(g, g) == 0.0
    assert gradient_error({"a": torch.ones(4) * 1.5}, g) == pytest.approx(0.5)
    assert gradient_error({}, g) == pytest.approx(1.0)
    assert gradient_error({"a": torch.full((4,), torch.inf)}, g) is None
    assert gradient_error(g, {}) is None


def test_both_parts_of_complex_gradients_are_compared():
    model = nn.Linear(3, 2, dtype=torch.complex64)
    model(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
    found = gradients(model)
    assert gradient_error(found, found) == 0.0
    turned = {name: gradient.conj() for name, gradient in found.items()}  # the real parts agree
    difference = math.hypot(*(2 * float(g.imag.norm()) for g in found.values()))
    whole = math.hypot(*(float(torch.linalg.vector_norm(g)) for g in found.values()))
    assert gradient_error(turned, found) == pytest.approx(difference / whole)
    assert difference > 0.1 * whole


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("is_buffer", [True, False])
def test_sparse_state_of_every_layout_is_kept_and_compared(layout, is_buffer):
    """The matrix of a graph's edges, in a buffer or in an attribute."""

    class Graph(nn.Linear):
        edges: torch.Tensor

    net, edges = Graph(4, 2), torch.diag(torch.arange(1.0, 5.0)).to_sparse(layout=layout)
    if is_buffer:
        net.register_buffer("edges", edges)
    else:
        net.edges = edges
    kept = take_snapshot(net)
    assert buffer_values(net, None)["edges"].tolist() == [1.0, 2.0, 3.0, 4.0]
    (edges._values() if layout is torch.sparse_coo else edges.values()).mul_(2)
    assert buffer_values(net, None)["edges"].tolist() == [2.0, 4.0, 6.0, 8.0]
    restore_snapshot(net, kept)
    assert buffer_values(net, None)["edges"].tolist() == [1.0, 2.0, 3.0, 4.0]
