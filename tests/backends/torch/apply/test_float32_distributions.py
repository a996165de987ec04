"""Distributions that a model returns: built from float32 parameters, exact in what they derive."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

from autoprec.backends.torch.apply import float32_distributions
from autoprec.backends.torch.apply.float32_results import results_to_float32
from autoprec.backends.torch.apply.model_changes import restore
from tests.backends.torch.operated import BFLOAT16, FLOAT16, FLOAT32, apply

pytestmark = pytest.mark.torch

POLICIES = pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])

Build = Callable[[torch.Tensor], D.Distribution]


class Actor(nn.Module):
    """A policy over 8 values, whose `build` no reading of the source follows."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 8))
        self.build = build

    def forward(self, states: torch.Tensor) -> D.Distribution:
        return self.build(4 * self.trunk(states))


def mixture(z: torch.Tensor) -> D.Distribution:
    parts = D.Independent(D.Normal(z.unsqueeze(-1), F.softplus(z).unsqueeze(-1) + 0.1), 1)
    return D.MixtureSameFamily(D.Categorical(logits=z), parts)


def squashed(z: torch.Tensor) -> D.Distribution:
    base = D.Normal(z, z.exp().clamp(0.1, 2.0))
    return D.TransformedDistribution(base, [D.TanhTransform(cache_size=1)])


def correlated(z: torch.Tensor) -> D.Distribution:
    root = torch.diag_embed(F.softplus(z) + 0.5)
    return D.MultivariateNormal(z, covariance_matrix=root)


BUILT: dict[str, Build] = {
    "categorical of probabilities": lambda z: D.Categorical(z.softmax(-1)),
    "categorical of logits": lambda z: D.Categorical(logits=z),
    "one hot": lambda z: D.OneHotCategorical(probs=z.softmax(-1)),
    "bernoulli": lambda z: D.Independent(D.Bernoulli(probs=z.sigmoid()), 1),
    "normal": lambda z: D.Normal(z, F.softplus(z) + 0.1),
    "beta": lambda z: D.Beta(F.softplus(z) + 1, F.softplus(-z) + 1),
    "mixture": mixture,
    "squashed": squashed,
    "correlated": correlated,
    "dirichlet": lambda z: D.Dirichlet(F.softplus(z) + 1),
    "affine": lambda z: D.TransformedDistribution(
        D.Normal(torch.zeros(8), torch.ones(8)), [D.AffineTransform(z, 1 + z * z)]
    ),
}


@POLICIES
@pytest.mark.parametrize("name", BUILT)
def test_log_probabilities_are_those_of_float32(name: str, recipe: Any) -> None:
    model = Actor(BUILT[name])
    states = torch.randn(64, 4)
    exact = model(states)
    drawn = exact.sample()
    given = apply(recipe, model).forward(states)
    log_prob = given.log_prob(drawn)
    assert type(given) is type(exact)
    assert log_prob.dtype is torch.float32
    assert given.sample().dtype is drawn.dtype
    # No more than a product's own rounding moves it: for the parameters in 16 bits it is nats.
    error = (log_prob - exact.log_prob(drawn)).abs() / (1 + exact.log_prob(drawn).abs())
    assert error.quantile(0.9) < 0.1
    if "categorical" in name or name == "one hot":
        assert error.max() < 0.1
        rows = getattr(given, "probs").sum(-1)  # noqa: B009
        torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-6)


@POLICIES
def test_the_last_softmax_of_a_distribution_is_float32(recipe: Any) -> None:
    """In float16 the probability of a rare action would be zero."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = nn.Linear(1, 3)
            with torch.no_grad():
                self.actor.weight.copy_(torch.tensor([[0.0], [-8.0], [-15.0]]))
                self.actor.bias.zero_()

        def distribution(self, z: torch.Tensor) -> D.Distribution:
            probs = z.softmax(-1)
            return D.Categorical(probs=probs)

        def forward(self, states: torch.Tensor) -> tuple[D.Distribution, torch.Tensor]:
            return self.distribution(self.actor(states)), states

    model = Policy()
    precision = apply(recipe, model)
    given, _ = precision.forward(torch.ones(1, 1))
    assert precision.report.outputs == ("",)
    exact = torch.tensor([0.0, -8.0, -15.0]).log_softmax(-1)
    torch.testing.assert_close(given.logits[0], exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("validates", [True, False])
def test_validation_is_as_it_was_asked_for(validates: bool) -> None:
    model = Actor(lambda z: D.Categorical(z.softmax(-1), validate_args=validates))
    given = apply(BFLOAT16, model).forward(torch.ones(1, 4))
    assert given._validate_args is validates
    if validates:
        with pytest.raises(ValueError, match="within the support"):
            given.log_prob(torch.tensor([9]))


def test_a_method_that_builds_it_need_not_be_forward() -> None:
    model = Actor(BUILT["categorical of probabilities"])
    precision = apply(BFLOAT16, model)
    with precision.autocast():
        built = D.Categorical(model.trunk(torch.ones(1, 4)).softmax(-1))
    assert built.probs.dtype is torch.float32


def test_constructors_are_given_back_with_the_last_model() -> None:
    for model in list(float32_distributions._CLAIMS):  # other tests' models
        restore(model)
    before = D.Categorical.__init__
    first, second = apply(BFLOAT16, nn.Linear(2, 2)), apply(FLOAT16, nn.Linear(2, 2))
    assert D.Categorical.__init__ is not before
    low = torch.ones(2).bfloat16()
    assert D.Normal(low, low).loc.dtype is torch.bfloat16  # outside autocast nothing changes
    first.restore()
    assert D.Categorical.__init__ is not before
    second.restore()
    assert D.Categorical.__init__ is before
    apply(FLOAT32, nn.Linear(2, 2))
    assert D.Categorical.__init__ is before


def test_one_that_was_built_in_16_bits_derives_its_numbers_again() -> None:
    probs = torch.randn(5, 64).mul(4).softmax(-1).bfloat16()
    low = D.Categorical(probs, validate_args=False)
    assert low.logits.dtype is torch.bfloat16  # derived, and kept
    given = results_to_float32({"policy": low}, set())["policy"]
    exact = D.Categorical(probs.float())
    torch.testing.assert_close(given.probs.sum(-1), torch.ones(5))
    torch.testing.assert_close(given.logits, exact.logits, rtol=0.02, atol=0.02)
    assert given.entropy().dtype is torch.float32
    assert low.probs.dtype is torch.bfloat16
    expanded = results_to_float32(low.expand((2, 5)), set())
    assert expanded.log_prob(torch.zeros(2, 5)).dtype is torch.float32


def test_what_is_built_can_be_copied_and_saved() -> None:
    model = Actor(BUILT["mixture"])
    given = apply(BFLOAT16, model).forward(torch.ones(2, 4))
    point = torch.zeros(2, 1)
    with torch.no_grad():
        expected = given.log_prob(point)
    saved = pickle.dumps(D.Categorical(probs=given.mixture_distribution.probs.detach()))
    assert pickle.loads(saved).probs.dtype is torch.float32
    assert torch.equal(copy.copy(given).log_prob(point).detach(), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_builds_them_alike() -> None:
    torch._dynamo.reset()
    model = Actor(BUILT["normal"])
    given = apply(replace(BFLOAT16, compile=True), model).forward(torch.ones(2, 4))
    assert given.loc.dtype is given.scale.dtype is torch.float32
