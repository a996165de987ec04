"""Padding changes sizes, never the maths: equal to rounding, in values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from autoprec.backends.torch.apply.model_changes import restore
from autoprec.backends.torch.apply.padding import padding_obstacle
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Alignment, Recipe
from tests.backends.torch.operated import apply

pytestmark = pytest.mark.torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
MULTIPLES = st.sampled_from([4, 8, 16])
SIZES = st.integers(1, 19)
DTYPES = st.sampled_from(list(TOLERANCE))
few = settings(max_examples=25, deadline=None)


def paddable(model: nn.Module, multiple: int) -> tuple[str, ...]:
    return tuple(
        path for path, _ in model.named_modules() if not padding_obstacle(model, path, multiple)
    )


def padded(model: nn.Module, multiple: int, *paths: str) -> Any:
    names = paths or paddable(model, multiple)
    return apply(Recipe(alignment=Alignment(multiple, names)), model)


def results(run: Callable[[], torch.Tensor], model: nn.Module, *inputs: torch.Tensor) -> list[Any]:
    """The output, then the gradient of every input and parameter."""
    for tensor in (*inputs, *model.parameters()):
        tensor.grad = None
    torch.manual_seed(3)
    output = run()
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    (output * probe.to(output.dtype)).sum().backward()
    return [output.detach(), *(t.grad for t in (*inputs, *model.parameters()))]


def check_equal(
    model: nn.Module, run: Callable[[nn.Module], torch.Tensor], multiple: int, *inputs: torch.Tensor
) -> None:
    """Hold the largest deviation against the largest magnitude of what it deviates from."""
    expected = results(lambda: run(model), model, *inputs)
    expected_paths = paddable(model, multiple)
    report = padded(model, multiple).report
    assert len(report.padded) == len(expected_paths)
    for ours, theirs in zip(results(lambda: run(model), model, *inputs), expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and ours.numel():
            assert ours.shape == theirs.shape
            scale = max(1.0, theirs.abs().max().item())
            assert (ours - theirs).abs().max().item() <= TOLERANCE[ours.dtype] * scale


def inputs_of(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


@few
@given(SIZES, SIZES, MULTIPLES, st.booleans(), DTYPES, st.sampled_from([(), (3,), (2, 3)]))
def test_linear(
    width: int, features: int, multiple: int, bias: bool, dtype: torch.dtype, lead: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, features, bias, dtype=dtype))
    inputs = inputs_of(*lead, width, dtype=dtype)
    check_equal(model, lambda m: m(inputs), multiple, inputs)


@few
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    MULTIPLES,
    st.booleans(),
    DTYPES,
    st.sampled_from(["zeros", "circular", "reflect", "same"]),
    st.booleans(),
)
def test_convolutions(
    spatial: int,
    inner: int,
    outer: int,
    multiple: int,
    bias: bool,
    dtype: torch.dtype,
    mode: str,
    batched: bool,
) -> None:
    torch.manual_seed(0)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial - 1]
    options: dict[str, Any] = {"padding": 1, "padding_mode": mode, "stride": 2}
    if mode == "same":
        options = {"padding": "same", "dilation": 2}
    model = nn.Sequential(kind(inner, outer, 3, bias=bias, dtype=dtype, **options))
    lead = (2,) if batched else ()
    inputs = inputs_of(*lead, inner, *(5,) * spatial, dtype=dtype)
    check_equal(model, lambda m: m(inputs), multiple, inputs)


@few
@given(SIZES, MULTIPLES, DTYPES, st.booleans(), st.booleans())
def test_embedding(
    width: int, multiple: int, dtype: torch.dtype, padding: bool, by_frequency: bool
) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(
        7, width, padding_idx=2 if padding else None, scale_grad_by_freq=by_frequency, dtype=dtype
    )
    indices = torch.tensor([[1, 2, 2], [6, 0, 1]])
    check_equal(nn.Sequential(table), lambda m: m(indices), multiple)


class TiedHead(nn.Module):
    def __init__(self, words: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, dtype=dtype)
        self.head = nn.Linear(width, words, bias=False, dtype=dtype)
        self.head.weight = self.table.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(indices))


@few
@given(SIZES, SIZES, MULTIPLES, DTYPES)
def test_a_tied_head_stays_tied(words: int, width: int, multiple: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = TiedHead(words, width, dtype)
    indices = torch.arange(6).reshape(2, 3) % words
    check_equal(model, lambda m: m(indices), multiple)
    assert model.head.weight is model.table.weight


MASKS = st.sampled_from(["none", "causal", "float", "padding", "both", "per head"])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    MULTIPLES,
    DTYPES,
    st.booleans(),
    st.booleans(),
    MASKS,
    st.sampled_from(["no", "mean", "each"]),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
)
def test_attention(
    heads: int,
    head_size: int,
    multiple: int,
    dtype: torch.dtype,
    bias: bool,
    batch_first: bool,
    mask: str,
    weights: str,
    dropout: float,
    cross: bool,
) -> None:
    torch.manual_seed(0)
    width = heads * head_size
    model = nn.Sequential(
        nn.MultiheadAttention(
            width, heads, dropout=dropout, bias=bias, batch_first=batch_first, dtype=dtype
        )
    )
    batch, source = 2, 4
    target = 3 if cross else source
    shape = (lambda n: (batch, n, width)) if batch_first else (lambda n: (n, batch, width))
    query = inputs_of(*shape(target), dtype=dtype)
    memory = inputs_of(*shape(source), dtype=dtype) if cross else query
    options = masks(mask, batch, heads, target, source, dtype)
    options |= {"need_weights": weights != "no", "average_attn_weights": weights == "mean"}

    def run(model: nn.Module) -> torch.Tensor:
        output, scores = model[0](query, memory, memory, **options)
        assert (scores is None) == (weights == "no")
        return output.sum() if scores is None else output.sum() + scores.square().sum()

    check_equal(model, run, multiple, query)


def masks(
    kind: str, batch: int, heads: int, target: int, source: int, dtype: torch.dtype
) -> dict[str, Any]:
    hidden = torch.ones(target, source, dtype=torch.bool).triu(1)
    lengths = torch.arange(source) >= torch.tensor([[3], [source]])
    return {
        "none": {},
        "causal": {"attn_mask": hidden, "is_causal": target == source},
        "float": {"attn_mask": torch.where(hidden, -1.5, 0.25).to(dtype)},
        "padding": {"key_padding_mask": lengths},
        "both": {"attn_mask": hidden, "key_padding_mask": lengths},
        "per head": {"attn_mask": hidden.expand(batch * heads, -1, -1)},
    }[kind]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_transformer_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 11, dropout=0.1, batch_first=True, dtype=dtype)
    inputs = inputs_of(2, 5, 6, dtype=dtype)
    check_equal(layer, lambda m: m(inputs), 8, inputs)


def test_unbatched_attention_is_computed_as_it_was() -> None:
    model = nn.Sequential(nn.MultiheadAttention(6, 2))
    inputs = torch.randn(4, 6, requires_grad=True)
    check_equal(model, lambda m: m[0](inputs, inputs, inputs)[0], 8, inputs)


@pytest.mark.parametrize("policy", [Policy.MIXED_BFLOAT16, Policy.FLOAT32])
def test_twenty_steps_of_adamw_stay_together(policy: Policy) -> None:
    def run(alignment: Alignment) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 13), nn.GELU(), nn.Linear(13, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        precision = apply(Recipe(policy=policy, alignment=alignment), model, optimizer)
        data = torch.randn(16, 5)
        losses = []
        for _ in range(20):
            with precision.autocast():
                loss = model(data).square().mean()
            precision.backward(loss)
            precision.step()
            losses.append(loss.item())
        return losses

    assert run(Alignment(8, ("0", "2"))) == pytest.approx(run(Alignment()), rel=1e-6)


def test_checkpoints_travel_between_padded_and_plain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters())
    precision = padded(model, 8)
    plain, its_optimizer = copy.deepcopy(model), None
    restore(plain)
    its_optimizer = torch.optim.Adam(plain.parameters())
    precision = apply(Recipe(alignment=Alignment(8, ("0",))), model, optimizer)
    precision.backward(model(torch.ones(2, 5)).sum())
    precision.step()
    plain.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    assert plain[0].weight.shape == (3, 5)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(its_optimizer.state_dict())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_padding_survives_compilation(backend: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 3))
    inputs = torch.randn(2, 3, 4, 4)
    expected = model(inputs)
    apply(Recipe(alignment=Alignment(8, ("0", "2")), compile=True), model, compile_backend=backend)
    torch.testing.assert_close(model(inputs), expected)


def test_the_report_gives_sizes_before_and_after() -> None:
    model = nn.Sequential(nn.Linear(5, 16))
    report = padded(model, 8).report
    assert report.padded[0].sizes == (("in_features", 5, 8), ("out_features", 16, 16))


def test_a_shared_module_is_padded_once() -> None:
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, layer)
    report = padded(model, 8, "0", "1").report
    assert [m.path for m in report.padded] == ["0"]
    model(torch.ones(1, 5))


def test_attention_that_is_said_to_be_causal_without_a_mask_fails_as_torchs_own_does() -> None:
    attention = nn.MultiheadAttention(6, 2, batch_first=True)
    inputs = torch.ones(2, 3, 6)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    expected, _ = attention(inputs, inputs, inputs, attn_mask=mask, is_causal=True)
    assert [m.path for m in padded(attention, 8, "").report.padded] == [""]
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        attention(inputs, inputs, inputs, is_causal=True)
    found, _ = attention(inputs, inputs, inputs, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(5, 3), torch.ones(2, 5)),
        (nn.Conv2d(5, 3, 3), torch.ones(2, 5, 4, 4)),
        (nn.Embedding(5, 3), torch.arange(5)),
    ],
    ids=["linear", "convolution", "embedding"],
)
def test_a_parametrized_weight_is_computed_once_in_a_forward(
    layer: nn.Module, inputs: torch.Tensor
) -> None:
    plain = spectral_norm(layer)  # each reading of the weight takes a step of its iteration
    ours = copy.deepcopy(plain)
    assert padded(ours, 8, "").report.padded
    for _ in range(2):
        torch.testing.assert_close(ours(inputs), plain(inputs))
    for name, buffer in plain.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer)
