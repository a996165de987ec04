"""One seed draws the same numbers in every layout and dtype, and float32's are torch's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec.backends.torch.trace.random_numbers import (
    DrawnAlike,
    RandomNumbers,
    drawn_alike_compiled,
)
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from tests.backends.torch.traced import BFLOAT16, FLOAT32, tracer

pytestmark = pytest.mark.torch

SHAPE = (3, 4, 5, 6)
ROUNDED = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "dropout2d": F.dropout2d,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "dropout in one kernel": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "stochastic depth": lambda x: x * (torch.rand(3, 1, 1, 1, dtype=x.dtype) < 0.5),
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.25)),
    "bernoulli_ by a tensor": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.25)),
    "normal by tensors": lambda x: torch.normal(torch.zeros_like(x), torch.ones_like(x)),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
    "integers": lambda x: torch.randint_like(x, 0, 100),
    "multinomial": lambda x: torch.multinomial(x.flatten(1).softmax(1), 3).to(x.dtype),
    "an own generator": lambda x: torch.empty_like(x).normal_(
        generator=torch.Generator().manual_seed(1)
    ),
    "out": lambda x: torch.rand(x.shape, out=torch.empty_like(x)),
}


def drawn(draw: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    torch.manual_seed(3)
    with DrawnAlike() as mode:
        found = draw(given)
    assert mode.seen
    assert found.dtype == given.dtype
    return found


@pytest.mark.parametrize("name", DRAWS)
def test_every_layout_and_dtype_draws_what_contiguous_float32_draws(name: str) -> None:
    given = torch.ones(SHAPE)
    torch.manual_seed(3)
    plain = DRAWS[name](given)
    after = torch.get_rng_state()
    for dtype, rounding in ROUNDED.items():
        for layout in (torch.contiguous_format, torch.channels_last):
            laid_out = given.to(dtype).contiguous(memory_format=layout)
            found = drawn(DRAWS[name], laid_out)
            torch.testing.assert_close(found.float(), plain, rtol=4 * rounding, atol=rounding)
            assert torch.equal(torch.get_rng_state(), after)


def test_a_randomised_slope_does_not_depend_on_the_signs_before_it() -> None:
    given = torch.randn(SHAPE)
    flipped = given.clone()
    flipped[0, 0, 0, 0] *= -1.0
    first, second = (drawn(lambda x: F.rrelu(x, training=True), x) for x in (given, flipped))
    assert torch.equal(first.flatten()[1:], second.flatten()[1:])
    slopes = first[given < 0] / given[given < 0]
    assert 1 / 8 <= slopes.min() < 0.2 < 0.3 < slopes.max() <= 1 / 3
    assert torch.equal(first[given > 0], given[given > 0])


GAMMAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gamma": torch._standard_gamma,
    "dirichlet": torch._sample_dirichlet,
    "beta": lambda x: torch._sample_dirichlet(torch.stack((x, x.flip(0)), -1))[..., 0],
}


@pytest.mark.parametrize("name", GAMMAS)
@pytest.mark.parametrize("size", [0.3, 3.0])
def test_shapes_that_rounding_changes_shift_no_draws(name: str, size: float) -> None:
    """Only the draws of the few elements whose proposals are turned down in one dtype differ."""
    shapes = size * (0.5 + torch.rand(4000, 3))
    exact, rounded = (drawn(GAMMAS[name], each) for each in (shapes, shapes * (1 + 2**-8)))
    away = ((exact - rounded).abs() > 0.1 * exact.abs() + 1e-3).float().mean()
    assert away < 0.002


@pytest.mark.parametrize("shape", [0.2, 1.0, 2.5, 40.0])
def test_gammas_have_their_moments(shape: float) -> None:
    found = drawn(torch._standard_gamma, torch.full((200_000,), shape)).double()
    assert found.min() >= 0
    assert found.mean() == pytest.approx(shape, rel=0.02)
    assert found.var() == pytest.approx(shape, rel=0.04)
    skew = ((found - shape) ** 3).mean() / shape**1.5
    assert skew == pytest.approx(2 / shape**0.5, rel=0.15)
    logs = found.clamp_min(1e-300).log().mean()
    assert logs == pytest.approx(float(torch.digamma(torch.tensor(shape))), abs=0.02 / shape)


class Reparametrised(nn.Module):
    """A posterior of concentrations, drawn from where gradients go through."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.encoder, self.decoder = kind, nn.Linear(6, 32), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = (F.softplus(self.encoder(x)) + 0.1).chunk(2, -1)
        made: dict[str, Callable[[], Any]] = {
            "beta": lambda: torch.distributions.Beta(one, other),
            "gamma": lambda: torch.distributions.Gamma(one, other),
            "dirichlet": lambda: torch.distributions.Dirichlet(one),
        }
        found: Tensor = self.decoder(made[self.kind]().rsample()).flatten()
        return found


@pytest.mark.parametrize("kind", ["beta", "gamma", "dirichlet"])
def test_reparametrised_draws_are_those_of_the_float32_step(kind: str) -> None:
    trace = tracer(build_model=lambda: Reparametrised(kind))
    trace.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    for point in trace.compare_steps(recipe=BFLOAT16):
        assert point.loss == pytest.approx(point.reference, rel=0.03)
        assert point.gradient_error is not None
        assert point.gradient_error < 0.1


@pytest.mark.parametrize(
    "draw", [lambda x: F.rrelu(x, training=True), DRAWS["dropout in one kernel"]]
)
def test_gradients_follow_what_was_drawn(draw: Callable[[Tensor], Tensor]) -> None:
    given = torch.randn(SHAPE, requires_grad=True)
    found = drawn(draw, given)
    found.sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad, found.detach() / given.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_the_backward_pass_repeats_draws_the_same(reentrant: bool) -> None:
    layer, given = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
    gradients = []
    for repeat in (False, True):
        layer.zero_grad()
        torch.manual_seed(0)

        def forward(x: Tensor) -> Tensor:
            return F.dropout(layer(x).bfloat16())

        with DrawnAlike():
            out = checkpoint(forward, given, use_reentrant=reentrant) if repeat else forward(given)
            out.float().sum().backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad.clone())
    assert torch.equal(*gradients)


def test_attention_and_recurrent_layers_drop_the_same_in_both_dtypes() -> None:
    torch.manual_seed(0)
    query, lstm = torch.randn(2, 2, 5, 8), nn.LSTM(8, 8, 2, dropout=0.5)

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    def recur(x: Tensor) -> Tensor:
        found: Tensor = lstm.to(x.dtype)(x[0])[0].detach()
        return found

    for draw in (attend, recur):
        exact, rounded = (drawn(draw, query.to(dtype)) for dtype in (torch.float32, torch.bfloat16))
        torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)


def test_where_nothing_is_drawn_no_mode_is_left_on() -> None:
    numbers = RandomNumbers()
    seen = []
    for step in range(4):
        with numbers.alike():
            seen.append(type(torch.utils._python_dispatch._get_current_dispatch_mode()))
            if step == 2:
                torch.rand(3)
    assert seen == [DrawnAlike, type(None), type(None), DrawnAlike]


class Noisy(nn.Module):
    """Adds noise and drops out in the dtype it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        hidden = F.dropout(hidden + 0.5 * torch.randn_like(hidden), 0.5)
        found: Tensor = self.two(hidden.relu()).flatten()
        return found


def test_a_step_in_bfloat16_has_the_noise_of_the_float32_step() -> None:
    trace = tracer(build_model=Noisy)
    trace.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    for point in trace.compare_steps(recipe=BFLOAT16):
        assert point.loss == pytest.approx(point.reference, rel=0.02)
        assert point.gradient_error is not None
        assert point.gradient_error < 0.05
    assert trace.trajectory(recipe=FLOAT32, seed=0, steps=4).finite


class Convolved(nn.Module):
    """Drops out between convolutions, where the layout decides which element is which."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.one(x.repeat(1, 8).view(-1, 3, 4, 4)).relu(), 0.5)
        hidden = hidden + torch.rand_like(hidden)
        found: Tensor = self.two(hidden).flatten(1).sum(1)
        return found


@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_BFLOAT16])
def test_trainings_with_dropout_stay_together_in_channels_last(policy: Policy) -> None:
    trace = tracer(build_model=Convolved)
    plain = trace.reference(batch_size=8, steps=6, checkpoints=(0, 5))
    recipe = Recipe(policy, batch_size=8, memory_format="channels_last")
    losses = trace.trajectory(recipe=recipe, seed=0, steps=6).losses
    assert losses == pytest.approx(plain.losses, rel=1e-4 if policy is Policy.FLOAT32 else 0.05)


class OwnGenerator(Noisy):
    """Drops out by a generator of its own, which each step may seed itself."""

    def __init__(self, seeds: bool) -> None:
        super().__init__()
        self.seeds, self.generator = seeds, torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        generator = self.generator.manual_seed(7) if self.seeds else self.generator
        hidden = self.one(x)
        kept = torch.rand(hidden.shape, generator=generator) > 0.5
        found: Tensor = self.two(hidden.relu() * kept).flatten()
        return found


@pytest.mark.parametrize("seeds", [False, True])
def test_a_generator_that_the_model_holds_draws_alike_in_what_is_compared(seeds: bool) -> None:
    trace = tracer(build_model=lambda: OwnGenerator(seeds))
    trace.reference(batch_size=8, steps=6, checkpoints=(0, 3, 5))
    points = (*trace.noise(draws=2), *trace.compare_steps(recipe=BFLOAT16))
    assert len(points) == 9
    for point in points:
        assert point.loss == pytest.approx(point.reference, rel=0.02)
        assert point.gradient_error is not None
        assert point.gradient_error < 0.05
    split = trace.compare_settings(recipe=Recipe(batch_size=4, accumulation_steps=2))
    drawn_anew = "a step draws random numbers of its own besides dropout"
    assert drawn_anew in " ".join(split.not_covered)


OUTSIDE: dict[str, Any] = {
    "torch": torch.Generator().manual_seed(3),
    "numpy": np.random.default_rng(3),
    "python": random.Random(3),
}


class Helper:
    """Draws masks from a generator outside of the model."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def mask(self, like: Tensor) -> Tensor:
        generator, size = OUTSIDE[self.kind], like.numel()
        if isinstance(generator, torch.Generator):
            drawn = torch.rand(size, generator=generator)
        elif isinstance(generator, random.Random):
            drawn = torch.tensor([generator.random() for _ in range(size)])
        else:
            drawn = torch.as_tensor(generator.random(size))
        return drawn.view(like.shape) > 0.5


class OutsideGenerator(Noisy):
    """Drops out by what a helper draws."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.helper = Helper(kind)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        found: Tensor = self.two(hidden.relu() * self.helper.mask(hidden)).flatten()
        return found


@pytest.mark.parametrize("kind", OUTSIDE)
def test_generators_outside_of_the_model_draw_alike_in_what_is_compared(kind: str) -> None:
    trace = tracer(build_model=lambda: OutsideGenerator(kind))
    plain = trace.reference(batch_size=8, steps=4, checkpoints=(0, 3))
    for point in trace.compare_steps(recipe=BFLOAT16):
        assert point.loss == pytest.approx(point.reference, rel=0.02)
        assert point.gradient_error is not None
        assert point.gradient_error < 0.05
    assert trace.trajectory(recipe=FLOAT32, seed=0, steps=4).losses == plain.losses
    split = trace.compare_settings(recipe=Recipe(batch_size=4, accumulation_steps=2))
    assert "draws random numbers of its own" in " ".join(split.not_covered)


class Compiled(nn.Module):
    """A feature map with dropout and noise in it, and a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout2d(F.dropout(x * self.weight, 0.5), 0.3)
        return hidden + 0.1 * torch.randn_like(hidden)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        # A C++ compiler takes half a minute of it.
        pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.release]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_code_draws_what_eager_code_draws(backend: str) -> None:
    given = torch.ones(SHAPE).to(memory_format=torch.channels_last)
    eager = drawn(Compiled(), given)
    torch.compiler.reset()
    with drawn_alike_compiled():
        model = Compiled()
        model.compile(backend=backend)
        torch.manual_seed(3)
        compiled = model(given)
    torch.testing.assert_close(compiled, eager)
    assert F.dropout.__module__ == "torch.nn.functional"
