"""What one float32 step shows: only the user's own errors end it; what fails besides is unknown."""

from __future__ import annotations

import collections
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm

from autoprec.backends.protocol import Task
from autoprec.backends.torch.apply.process_settings import process_settings_restored
from autoprec.backends.torch.measure import step_costs
from autoprec.backends.torch.measure.describe import describe
from autoprec.backends.torch.train import batch_splitting
from autoprec.core.measurement import TaskFacts

pytestmark = pytest.mark.torch


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def pairs(batch_size: int) -> Iterator[Any]:
    while True:
        yield torch.randn(batch_size, 4), torch.randn(batch_size, 1)


def task(**changes: Any) -> Task:
    known = {"name": "task.py", "build_model": small, "build_data": pairs}
    if "training_step" not in changes:
        known["loss_fn"] = F.mse_loss
    return Task(**(known | changes))


def facts(batch_size: int = 32, **changes: Any) -> TaskFacts:
    return describe(
        task(**changes),
        device="cpu",
        seed=0,
        batch_size=batch_size,
        report=lambda *_: None,
        software={},
    )


def by_inputs(model: nn.Module, batch: Any) -> torch.Tensor:
    """A physics-informed net in small: the gradient by a leaf that is the model's input."""
    inputs = batch[0].requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return (slope**2).mean() + F.mse_loss(outputs, batch[1])


def by_function(model: nn.Module, batch: Any) -> torch.Tensor:
    """Forces from energies, by torch.func."""
    weights = dict(model.named_parameters())

    def energy(inputs: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (inputs,)).sum()

    forces = torch.func.vmap(torch.func.grad(energy))(batch[0])
    return (forces**2).mean()


@pytest.mark.parametrize("step", [by_inputs, by_function])
def test_gradients_by_inputs_are_described(step: Callable[..., Any]) -> None:
    found = facts(training_step=step)
    assert found.flops_per_sample is not None
    assert found.flops_per_sample > 3 * 2 * (4 * 16 + 16)  # more than one pass there and back
    assert found.splittable


def test_operations_by_module_where_torch_can_tell_them_apart() -> None:
    shares = {unit.path: unit.products for unit in facts().units}
    assert shares["0"] > 0.5  # inputs need no gradient, so it is 2 to 3 there
    assert shares["0"] + shares["2"] == pytest.approx(1)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.mean(0) for part in self.linear(inputs).unbind()])


def jagged(batch_size: int) -> Iterator[Any]:
    while True:
        parts = [torch.randn(1 + index % 3, 4) for index in range(batch_size)]
        yield (
            torch.nested.nested_tensor(parts, layout=torch.jagged),
            torch.randn(batch_size, 1),
        )


def test_what_cannot_be_counted_is_unknown() -> None:
    found = facts(build_model=Jagged, build_data=jagged)
    assert found.flops_per_sample is None
    assert found.samples == 32
    assert found.splittable


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


def test_hard_coded_shapes_are_not_split_and_say_why() -> None:
    found = facts(
        training_step=lambda model, batch: F.mse_loss(model(batch[0].view(32, 4)), batch[1])
    )
    assert not found.splittable
    assert "could not be compared" in found.split_reason
    assert "shape '[32, 4]' is invalid" in found.split_reason


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
    with batch_splitting._without_dropout(model):
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
    assert "differ from the whole batch's by 5.0e-01" in facts(loss_fn=summed).split_reason


def test_nothing_is_computed_in_float64_where_a_device_has_none() -> None:
    class NoFloat64(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(result):
                assert not (isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64), func
            return result

    with NoFloat64():
        assert facts().splittable


def test_the_users_own_errors_are_errors() -> None:
    def wrong(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError):
        facts(training_step=wrong)


def test_a_measurement_without_memory_is_unknown() -> None:
    calls = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(batch)
        if 1 < len(calls) <= 5:  # operations twice, what is kept, the whole batch
            torch.empty(2**50)
        return F.mse_loss(model(batch[0]), batch[1])

    found = facts(training_step=step)
    assert found.flops_per_sample is None
    assert found.saved_bytes_per_sample == 0
    assert not found.splittable
    assert found.split_reason.endswith("there is not enough memory for it")


PEAKS = """
import os, re, torch
from torch import nn
from autoprec.backends.protocol import Task
from autoprec.backends.torch.measure.describe import describe

def build_model():
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))

def build_data(batch_size):
    while True:
        yield torch.randn(batch_size, 1024), torch.randn(batch_size, 1024)

def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.01)

def train():
    model = build_model()
    optimizer = build_optimizer(model)
    for _, (inputs, targets) in zip(range(3), build_data(32)):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

def described():
    task = Task("task.py", build_model, build_data, nn.functional.mse_loss, None, build_optimizer)
    facts = describe(
        task, device="cpu", seed=0, batch_size=32, report=lambda *_: None, software={}
    )
    assert facts.splittable and facts.flops_per_sample and facts.saved_bytes_per_sample

def peak():
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status).group(1))

for run in (train, described):
    child = os.fork()
    if not child:
        before = peak()
        run()
        print(peak() - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/status")
def test_a_task_is_described_in_the_memory_that_training_takes() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True, timeout=120
    )
    training, described = (int(line) for line in ran.stdout.split())
    assert training > 100 * 1024  # KiB: large enough to tell one copy of the gradients
    assert described < 1.25 * training


def test_what_is_counted_is_freed_at_once() -> None:
    """Without a garbage collection: a pass's activations must not outlive it."""
    import gc
    import weakref

    seen = []

    class Notes(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            output = inputs.exp()
            seen.append(weakref.ref(output))
            return output

    model = nn.Sequential(nn.Linear(4, 1), Notes())
    batch = (torch.randn(8, 4), torch.randn(8, 1))
    gc.collect()
    gc.disable()
    try:
        step_costs.saved_bytes(task(), model, batch, 0)
        assert [reference() for reference in seen] == [None]
    finally:
        gc.enable()


ROUNDED = [
    ("cpu", "torch.set_float32_matmul_precision('medium')", "bfloat16"),
    ("cpu", "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", "bfloat16"),
    ("cpu", "torch.backends.fp32_precision = 'bf16'", "bfloat16"),
    ("cuda", "torch.set_float32_matmul_precision('high')", "TF32"),
    ("cuda", "torch.set_float32_matmul_precision('medium')", "TF32"),
    ("cuda", "torch.backends.cuda.matmul.allow_tf32 = True", "TF32"),
    ("cuda", "torch.backends.cuda.matmul.fp32_precision = 'tf32'", "TF32"),
    ("cuda", "torch.backends.fp32_precision = 'tf32'", "TF32"),
]
PLAIN = [
    ("cpu", "torch.backends.cuda.matmul.allow_tf32 = True"),
    ("cuda", "torch.backends.cudnn.allow_tf32 = True"),
    ("cuda", "torch.backends.cuda.matmul.fp32_precision = 'ieee'"),
    ("mps", "torch.set_float32_matmul_precision('high')"),
    ("xpu", "torch.set_float32_matmul_precision('high')"),
    ("cuda", "pass"),
]


def test_settings_that_round_float32_products_are_told() -> None:
    """Each in a process of its own: what the newer settings change, nothing puts back exactly."""
    script = """
import os, torch
from autoprec.backends.torch.train.low_precision import low_precision
for device_type, statement in %r:
    child = os.fork()
    if not child:
        exec(statement)
        print(low_precision(torch.nn.Linear(1, 1), set(), device_type), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    cases = [case[:2] for case in (*ROUNDED, *PLAIN)]
    ran = subprocess.run(
        [sys.executable, "-c", script % cases],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    said = ran.stdout.splitlines()
    assert len(said) == len(cases)
    for (_, statement, rounded), line in zip(ROUNDED, said, strict=False):
        assert f"rounded to {rounded} " in line, statement
    assert said[len(ROUNDED) :] == [""] * len(PLAIN)


def test_a_rounded_baseline_is_part_of_the_facts() -> None:
    with process_settings_restored():
        torch.set_float32_matmul_precision("medium")
        assert "apply_profile leaves the setting" in facts().low_precision
    assert facts().low_precision == ""


def test_kernels_are_what_a_step_runs_with_their_operands() -> None:
    found = facts(build_optimizer=lambda model: torch.optim.Adam(model.parameters()))
    flops = sum(kernel.count * kernel.flops_per_sample for kernel in found.kernels)
    assert flops == pytest.approx(found.flops_per_sample)
    first = next(k for k in found.kernels if k.flops_per_sample == 2 * 4 * 16)
    assert first.bytes_per_sample == 4 * (4 + 16)  # images in, features out
    assert first.fixed_bytes == 4 * (4 * 16 + 16)
    assert all(kernel.bytes_per_sample or kernel.fixed_bytes for kernel in found.kernels)
    weights = 4 * 16 + 16 + 16 + 1
    assert 0 <= found.optimizer_bytes - 2 * 4 * weights <= 4 * 4  # Adam's moments and its counts


def test_kernels_that_cannot_be_watched_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no dispatch here")

    monkeypatch.setattr(step_costs, "run_pass", fail)
    assert step_costs.try_to_measure(lambda: step_costs.kernels(task(), small(), None, 0, 1)) == (
        None,
        "RuntimeError: no dispatch here",
    )
