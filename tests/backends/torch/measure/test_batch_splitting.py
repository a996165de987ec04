"""Whether a batch may be split, and the reason where it may not."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm

from autoprec.backends.torch.measure import batch_splitting
from tests.backends.torch.described import facts

pytestmark = pytest.mark.torch


class Encoding(collections.UserDict):
    """Transformers' BatchEncoding in small: items as attributes, and it moves itself."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]

    def to(self, device: str) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Attributes(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("kind", [Encoding, Attributes])
def test_batches_with_attributes_keep_them_when_they_are_cut(kind: type) -> None:
    found = facts(
        build_data=lambda n: [kind(x=torch.randn(n, 4), y=torch.randn(n, 1))],
        training_step=lambda model, batch: F.mse_loss(model(batch.x), batch.y),
    )
    assert found.splittable


def test_sparse_gradients_are_compared() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 1)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.linear(self.table(words).mean(1))

    given = {
        "build_model": Words,
        "build_data": lambda n: [(torch.randint(50, (n, 5)), torch.randn(n, 1))],
        "build_optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    }
    assert facts(**given).splittable
    summed = facts(**given, loss_fn=lambda o, t: F.mse_loss(o, t, reduction="sum"))
    assert "a summed loss" in summed.split_reason


def hard_coded(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0].view(32, 4)), batch[1])


def test_a_model_of_one_batch_size_is_not_split_and_says_why() -> None:
    found = facts(training_step=hard_coded)
    assert not found.splittable
    assert found.fixed_batch
    assert found.split_reason.startswith(
        "half a batch does not train, so the model runs at batches of 32 only (RuntimeError: "
        "shape '[32, 4]' is invalid"
    )


def data_of(batches: int) -> Callable[[int], Any]:
    """Return the data of so many batches of 32 samples."""

    def build_data(batch_size: int) -> Any:
        samples = torch.randn(32 * batches, 5).split(batch_size)
        return [(each[:, :4], each[:, 4:]) for each in samples]

    return build_data


def test_it_runs_at_its_batch_alone_also_where_the_data_hold_no_larger_one() -> None:
    assert facts(training_step=hard_coded, build_data=data_of(1)).fixed_batch


def at_least_20(model: nn.Module, batch: Any) -> torch.Tensor:
    assert len(batch[0]) >= 20
    return F.mse_loss(model(batch[0]), batch[1])


def test_a_model_that_trains_at_twice_the_batch_runs_at_others() -> None:
    found = facts(training_step=at_least_20)
    assert (found.splittable, found.fixed_batch) == (False, False)
    assert "could not be compared with their batch: AssertionError" in found.split_reason


class Sealed(list):
    """A batch of a kind that nobody can make a part of, and that moves itself."""

    def __init__(self, *, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)

    def to(self, device: str) -> Sealed:
        return self


def test_a_batch_that_no_part_can_be_made_of_is_not_split_and_says_why() -> None:
    found = facts(
        build_data=lambda n: [Sealed(tensors=[torch.randn(n, 4), torch.randn(n, 1)])],
        training_step=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
    )
    assert "a batch cannot be cut in two: TypeError: " in found.split_reason


def test_what_cannot_be_cut_is_not_split_and_says_why() -> None:
    found = facts(
        build_data=lambda n: [(torch.randn(5 * n + 1, 4), torch.arange(5 * n + 1) // 5, n)],
        training_step=lambda model, batch: model(batch[0]).square().mean(),
        count_samples=lambda batch: batch[2],
    )
    assert found.samples == 32
    assert "changes with the batch, but not sample by sample" in found.split_reason
    assert found.warnings == ()


def test_samples_in_doubt_are_a_warning() -> None:
    found = facts(
        build_data=lambda n: [(torch.randn(5 * n + 1, 4), torch.arange(5 * n + 1) // 5)],
        training_step=lambda model, batch: model(batch[0]).square().mean(),
    )
    assert any("define count_samples(batch) -> int" in warning for warning in found.warnings)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.linear = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.layer(inputs).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mixed = self.linear(inputs)
        mixed = F.scaled_dot_product_attention(mixed, mixed, mixed, dropout_p=0.3)
        mixed = F.dropout(mixed, 0.3)
        mixed = nn.functional.multi_head_attention_forward(
            *(mixed.transpose(0, 1),) * 3,
            *(16, 2, self.linear.weight.repeat(3, 1), None, None, None, False, 0.3),
            *(self.linear.weight, None),
            need_weights=False,
        )[0]
        return self.last(mixed.mean(0))


@pytest.mark.parametrize("model", [Encoder, Attention])
def test_dropout_does_not_hide_that_a_batch_may_be_split(model: Callable[[], nn.Module]) -> None:
    found = facts(
        build_model=model, build_data=lambda n: [(torch.randn(n, 6, 16), torch.randn(n, 1))]
    )
    assert (found.splittable, found.split_reason) == (True, "")


def test_dropout_is_as_it_was_afterwards() -> None:
    model = Encoder()
    with batch_splitting.without_dropout(model):
        assert model.layer.self_attn.dropout == model.layer.dropout1.p == 0.0
    assert model.layer.self_attn.dropout == model.layer.dropout1.p == 0.3


def test_random_numbers_of_the_steps_own_are_the_reason_told() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0] + torch.randn_like(batch[0])), batch[1])

    assert "random numbers of its own" in facts(training_step=noisy).split_reason


def test_buffers_that_every_forward_changes_are_no_random_numbers() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(
            spectral_norm(nn.Linear(4, 16), n_power_iterations=1), nn.Linear(16, 1)
        )

    assert "changes what the next one computes" in facts(build_model=normed).split_reason


def test_gradients_that_are_not_finite_are_the_reason_told() -> None:
    def unbiased(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs**2).sum() / (len(outputs) - 1)  # of one sample it is infinite

    found = facts(2, loss_fn=unbiased)
    assert "not finite" in found.split_reason


def test_batchnorm_is_the_reason_told() -> None:
    found = facts(build_model=lambda: nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)))
    assert "BatchNorm" in found.split_reason


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_gradients_whose_squares_no_float32_holds_are_compared(scale: float) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * scale).mean()

    def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * scale).sum()

    assert facts(loss_fn=loss).splittable
    assert "differ from the whole batch's by 0.5" in facts(loss_fn=summed).split_reason


def test_nothing_is_computed_in_float64_where_a_device_has_none() -> None:
    class NoFloat64(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(result):
                assert not (isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64), func
            return result

    with NoFloat64():
        assert facts().splittable


def sixteen_bit(dtype: torch.dtype, *more: nn.Module) -> dict[str, Any]:
    """A task whose weights and inputs are of a 16-bit dtype."""

    def build_model() -> nn.Module:
        hidden = nn.Linear(32, 64)
        return nn.Sequential(hidden, *more, nn.GELU(), nn.Linear(64, 5)).to(dtype)

    return {
        "build_model": build_model,
        "build_data": lambda n: [(torch.randn(n, 32).to(dtype), torch.randint(5, (n,)))],
        "loss_fn": lambda outputs, targets: F.cross_entropy(outputs.float(), targets),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_with_16_bit_weights_is_split_though_its_gradients_are_rounded(
    dtype: torch.dtype,
) -> None:
    assert facts(**sixteen_bit(dtype)).splittable
    mixing = facts(**sixteen_bit(dtype, nn.BatchNorm1d(64)))
    assert not mixing.splittable
    assert "BatchNorm" in mixing.split_reason


def test_a_task_with_an_autocast_of_its_own_is_split() -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    given = sixteen_bit(torch.float32) | {"training_step": loss_of}
    assert facts(**given).splittable
