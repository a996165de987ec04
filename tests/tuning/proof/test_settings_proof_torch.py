"""Layout, splitting and fused optimizers are compared with plain float32 on real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch import surgeon
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof

pytestmark = pytest.mark.torch

LAID_OUT = Recipe(batch_size=8, memory_format="channels_last")
SPLIT = Recipe(batch_size=4, accumulation_steps=2)


def images(batch_size: int) -> Iterator[Any]:
    for _ in range(60):
        y = torch.randint(2, (batch_size,))
        x = torch.randn(batch_size, 3, 8, 8)
        x[:, :, :, ::2] += 0.8 * y.view(-1, 1, 1, 1)
        yield x, y


class Net(nn.Module):
    """Two convolutions around something that a subclass does with the feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 2)

    def between(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(self.between(self.first(x))).mean((2, 3)))
        return found


class Strided(Net):
    def between(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return x.as_strided((b, c, h, w), (c * h * w, h * w, 1, w))


class Branching(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.relu() if x.is_contiguous() else x.tanh()


class InMemoryOrder(Net):
    def between(self, x: Tensor) -> Tensor:
        flat = torch.empty(0).set_(x.clone().untyped_storage())  # type: ignore[call-overload]
        ramp: Tensor = torch.linspace(0, 2, flat.numel())
        return x * (flat.detach() * ramp).view(x.shape).sigmoid()


class ByStride(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.relu() * (0.5 + (x.stride(1) % 5) / 5)


class Dropping(Net):
    def between(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.relu(), 0.5)


class Depth(Net):
    """Drops whole samples, adds noise to a feature map, and drops channels."""

    def between(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(x), 1, 1, 1, dtype=x.dtype) < 0.8
        noisy = x.relu() * kept + 0.1 * torch.randn_like(x)
        return nn.functional.dropout2d(noisy, 0.2)


class Randomised(Net):
    def between(self, x: Tensor) -> Tensor:
        chosen = nn.functional.gumbel_softmax(x, dim=1)
        return nn.functional.rrelu(x, training=True) + chosen


def proof(model: Callable[[], nn.Module], steps: int = 30, **given: Any) -> Proof:
    known = {"build_data": images, "loss_fn": nn.functional.cross_entropy, **given}
    task = Task("nets.py", model, **known)
    tracer = TorchBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)
    return Proof(tracer, steps=steps)


@pytest.mark.parametrize("model", [Strided, Branching, InMemoryOrder, ByStride])
def test_a_model_that_reads_memory_is_refused_in_channels_last(model: type[Net]) -> None:
    verdict = proof(model).prove(LAID_OUT)
    assert verdict.verdict == "rejected"
    assert "with channels_last it computes something else than plain float32" in verdict.reason
    assert "its outputs are off by" in verdict.reason


def test_the_guilty_setting_is_found_among_several_and_in_16_bits() -> None:
    several = replace(LAID_OUT, knobs={"fused_optimizer": True, "threads": 1})
    checked = proof(Strided)
    settings = checked.compare_settings(several.with_policy(Policy.MIXED_BFLOAT16))
    assert settings is not None
    assert settings.guilty == ("memory_format",)
    fused = replace(several, memory_format="contiguous")
    assert checked.prove(fused).accepted


@pytest.mark.parametrize("model", [Net, Dropping, Depth, Randomised])
def test_float32_and_bfloat16_in_channels_last_are_equal_whatever_is_drawn(
    model: type[Net],
) -> None:
    checked = proof(model)
    exact = checked.prove(LAID_OUT)
    assert exact.accepted
    assert exact.steps == 0
    assert "not trained further" in exact.reason
    mixed = checked.prove(LAID_OUT.with_policy(Policy.MIXED_BFLOAT16))
    assert mixed.accepted, mixed.reason
    assert mixed.steps >= 30
    assert mixed.covered[0].startswith("channels_last in float32: outputs, loss, gradient and")


def test_a_step_of_its_own_is_seen_as_well() -> None:
    def training_step(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    verdict = proof(Strided, loss_fn=None, training_step=training_step).prove(LAID_OUT)
    assert "its outputs are off by" in verdict.reason


def counted(batch_size: int) -> Iterator[Any]:
    """Targets of which some do not count, from the fifth batch on."""
    for step, (x, y) in enumerate(images(batch_size)):
        yield x, y if step < 4 else y.masked_fill(torch.rand(len(y)) < 0.5, -100)


def test_splitting_is_compared_with_the_unsplit_batch_all_over_the_data() -> None:
    assert proof(Dropping).prove(SPLIT).accepted
    verdict = proof(Net, build_data=counted).prove(SPLIT)
    assert verdict.verdict == "rejected"
    assert "with 2 micro-batches of 4 it computes something else" in verdict.reason
    assert "its outputs" not in verdict.reason
    assert "its gradient is" in verdict.reason


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def between(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x).relu()
        return found


def test_a_batch_whose_samples_mix_is_not_split_in_any_policy() -> None:
    checked = proof(Normalised)
    for policy in (Policy.FLOAT32, Policy.MIXED_BFLOAT16):
        verdict = checked.prove(SPLIT.with_policy(policy))
        assert verdict.verdict == "rejected"
    assert checked.prove(replace(LAID_OUT, knobs={"fused_optimizer": True})).accepted


def test_where_the_parts_draw_for_themselves_splitting_is_not_covered() -> None:
    verdict = proof(Depth).prove(SPLIT.with_policy(Policy.MIXED_BFLOAT16))
    assert verdict.accepted
    assert (
        "the unsplit batch of 8 (a step draws random numbers of its own" in verdict.not_covered[0]
    )


class Fussy(Net):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x)


def test_an_unsplit_batch_that_does_not_fit_is_not_covered_and_the_rest_is_compared() -> None:
    mixed = replace(SPLIT, memory_format="channels_last").with_policy(Policy.MIXED_BFLOAT16)
    verdict = proof(Fussy).prove(mixed)
    assert verdict.accepted
    assert verdict.covered[0].startswith("channels_last in float32")
    assert verdict.not_covered[0].startswith("the unsplit batch of 8 (CUDA out of memory")


class Unviewable(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1).view(x.shape).relu()


def test_what_raises_in_a_layout_alone_is_named() -> None:
    checked = proof(Unviewable)
    settings = checked.compare_settings(replace(LAID_OUT, knobs={"fused_optimizer": True}))
    assert settings is not None
    assert settings.guilty == ("memory_format",)
    assert "with channels_last the task's own code raises: view size" in settings.verdict.reason


def in_memory_order(x: Tensor) -> Tensor:
    """Reorder a feature map's numbers as they lie in memory."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


class EvaluatedInMemoryOrder(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.relu() if self.training else in_memory_order(x).relu()


class ViewedInEvaluation(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.relu() if self.training else x.view(len(x), -1).view(x.shape).relu()


class AveragedInMemoryOrder(Net):
    """Keeps an average of its first row, which nothing in training reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8, 8))

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(in_memory_order(x.detach())[:, :, 0].mean(0), 0.1)
        return x.relu()


class CountedInMemoryOrder(Net):
    """Counts which column of a row is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(8, dtype=torch.int64))

    def between(self, x: Tensor) -> Tensor:
        largest = in_memory_order(x.detach())[:, :, 0].argmax(-1)
        self.counts += torch.bincount(largest.flatten(), minlength=8)
        return x.relu()


class KeptInMemoryOrder(Net):
    """Keeps the last feature map, as it lies in memory, where no buffer is."""

    last: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        self.last = in_memory_order(x.detach())
        return x.relu()


class WithScores(Net):
    def scores(self, x: Tensor) -> Tensor:
        found: Tensor = in_memory_order(self.first(x))[:, 0].std((1, 2))
        return found


def mean_of_scores(model: nn.Module) -> float:
    torch.manual_seed(0)
    assert isinstance(model, WithScores)
    return float(model.scores(torch.randn(8, 3, 8, 8)).mean().detach())


@pytest.mark.parametrize(
    ("model", "told", "given"),
    [
        (EvaluatedInMemoryOrder, "its evaluation is", {}),
        (ViewedInEvaluation, "the task's own code raises: view size", {}),
        (AveragedInMemoryOrder, "its buffer average changes", {}),
        (CountedInMemoryOrder, "its buffer counts changes", {}),
        (KeptInMemoryOrder, "its buffer last changes", {}),
        (WithScores, "the metric of evaluate() is", {"evaluate": mean_of_scores}),
    ],
)
def test_what_only_evaluation_meets_is_compared_as_well(
    model: type[Net], told: str, given: dict[str, Any]
) -> None:
    verdict = proof(model, **given).prove(LAID_OUT)
    assert verdict.verdict == "rejected"
    assert f"with channels_last {'' if 'raises' in told else 'it computes'}" in verdict.reason
    assert told in verdict.reason


def test_a_step_that_needs_gradients_or_losses_of_training_is_evaluated_as_far_as_it_goes() -> None:
    class TwoWays(Net):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return {"loss": found.square().mean()} if self.training else (found,)

    def training_step(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0])["loss"]
        return loss

    def forces(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return force.square().mean()

    for model, step in ((TwoWays, training_step), (Net, forces)):
        verdict = proof(model, loss_fn=None, training_step=step).prove(LAID_OUT)
        assert verdict.verdict == "equal"
        assert "gradient and evaluation of 5 batches" in verdict.reason


class Swapped(torch.optim.AdamW):
    """Updates the wrong weights where it is fused."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0].get("fused"):
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None and parameter.dim() == 2:
                    parameter.grad = parameter.grad.flip(0)
        return super().step(closure)


def test_a_fused_optimizer_that_makes_other_updates_is_refused() -> None:
    given = {"build_optimizer": lambda model: Swapped(model.parameters(), lr=1e-3)}
    fused = Recipe(batch_size=8, knobs={"fused_optimizer": True})
    verdict = proof(Net, **given).prove(fused)
    assert verdict.verdict == "rejected"
    assert "with fused_optimizer" in verdict.reason
    assert "its weights after 2 updates moved" in verdict.reason


class CompiledOtherwise(Net):
    """Returns a second output, which the loss does not read and which compiled code gets wrong."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.wrong = training

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        reversed = torch.compiler.is_compiling() and self.training is self.wrong
        return scores, scores.flip(1) if reversed else scores.exp()


@pytest.mark.parametrize(
    ("training", "told"), [(True, "its outputs are off"), (False, "its evaluation is")]
)
def test_the_outputs_of_a_compiled_model_are_compared(
    training: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = partial(surgeon.TorchSurgeon, compile_backend="eager")
    monkeypatch.setattr(surgeon, "TorchSurgeon", eager)

    def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs[0], targets)

    given = {"loss_fn": loss_fn}
    compiled = Recipe(batch_size=8, compile=True)
    verdict = proof(lambda: CompiledOtherwise(training), **given).prove(compiled)
    assert verdict.verdict == "rejected"
    assert told in verdict.reason
    assert proof(Net).prove(compiled).covered[0].startswith("compiled in float32: outputs, loss,")
