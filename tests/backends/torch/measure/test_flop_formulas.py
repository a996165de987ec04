"""Operators that do what a plain module does cost what it costs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import ao, nn
from torch.nn.utils.rnn import pack_sequence

from autoprec.backends.torch.measure.flops import total

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning"),
]

WIDTH, HIDDEN, STEPS, BATCH = 8, 16, 5, 4


def sequences() -> torch.Tensor:
    return torch.randn(BATCH, STEPS, WIDTH)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_quantised_recurrent_layer_costs_what_it_cost(
    kind: Any, layers: int, both_ways: bool, packed: bool
) -> None:
    plain = nn.Sequential(kind(WIDTH, HIDDEN, layers, batch_first=True, bidirectional=both_ways))
    quantised = ao.quantization.quantize_dynamic(copy.deepcopy(plain), {kind}, torch.qint8)
    assert not isinstance(quantised[0], kind)
    gates, ways = (4 if kind is nn.LSTM else 3), 2 if both_ways else 1
    wide = WIDTH + (layers - 1) * ways * HIDDEN + layers * HIDDEN
    steps: Any = [torch.randn(length, WIDTH) for length in (5, 3, 1)]
    given = pack_sequence(steps) if packed else sequences()
    samples = 9 if packed else STEPS * BATCH
    expected = 2 * samples * ways * gates * HIDDEN * wide
    assert total(lambda: quantised(given)) == expected
    if not packed:
        assert total(lambda: plain(given)) == expected


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_quantised_cell_costs_what_it_cost(kind: Any) -> None:
    plain = nn.Sequential(kind(WIDTH, HIDDEN))
    quantised = ao.quantization.quantize_dynamic(copy.deepcopy(plain), {kind}, torch.qint8)
    assert not isinstance(quantised[0], kind)
    step = sequences()[:, 0]
    assert total(lambda: quantised(step)) == total(lambda: plain(step)) > 0


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(8, 4, 3), (2, 8, 9)),
        (nn.Conv2d(8, 4, 3, stride=2, groups=2), (2, 8, 9, 9)),
        (nn.ConvTranspose2d(8, 4, 3, stride=2), (2, 8, 5, 5)),
    ],
    ids=["1d", "2d in groups", "transposed"],
)
def test_a_quantised_convolution_costs_what_it_cost(layer: nn.Module, shape: Any) -> None:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "qnnpack"
    try:
        parts = (ao.quantization.QuantStub(), layer, ao.quantization.DeQuantStub())
        model = nn.Sequential(*parts).eval()
        model.qconfig = ao.quantization.get_default_qconfig("qnnpack")
        prepared = ao.quantization.prepare(model)
        images = torch.randn(shape)
        plain = total(lambda: prepared(images))
        converted = ao.quantization.convert(prepared)
        assert type(converted[1]) is not type(layer)
        assert total(lambda: converted(images)) == plain > 0
    finally:
        torch.backends.quantized.engine = before


def test_products_of_experts_are_counted_once_for_each_row() -> None:
    experts, width, wide = 2, 16, 32
    rows = torch.randn(16, width).bfloat16().requires_grad_()
    weights = torch.randn(experts, wide, width).bfloat16().mT.requires_grad_()
    ends = torch.tensor([8, 16], dtype=torch.int32)
    dense = 2 * 16 * width * wide

    def train() -> None:
        torch._grouped_mm(rows, weights, offs=ends).float().sum().backward()

    assert total(lambda: torch._grouped_mm(rows, weights, offs=ends)) == dense
    assert total(train) == 3 * dense
    stacked = weights.detach().mT.contiguous()
    assert total(lambda: torch._grouped_mm(stacked, weights)) == 2 * experts * wide * width * wide


@pytest.mark.parametrize("points", [10, 100])
def test_distances_count_as_the_products_they_are_made_of(points: int) -> None:
    ours, theirs = torch.randn(points, WIDTH, requires_grad=True), torch.randn(30, WIDTH)
    forward = 2 * points * 30 * WIDTH
    assert total(lambda: torch.cdist(ours, theirs)) == pytest.approx(forward, rel=0.3)
    assert total(lambda: torch.cdist(ours, theirs).sum().backward()) > 1.5 * forward
