"""The backend contract on a CUDA device; `make test-gpu` runs it where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contract import FLOAT16, QUICK, BackendContract, Subject
from torch import nn

from autoprec import Policy, Recipe, apply_profile, load_profile
from autoprec.backends import registry
from autoprec.backends.protocol import Task
from autoprec.backends.torch import devices
from autoprec.backends.torch.train.task_runner import move
from autoprec.core.recipe import LossScale

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[3]
PRETENDED = bool(os.environ.get("AUTOPREC_REHEARSAL"))
MIB = 2**20

real_hardware = pytest.mark.skipif(PRETENDED, reason="no pretended device computes so")


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def build_data(batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = []
    for _ in range(16):
        inputs = torch.randn(batch_size, 6)
        batches.append((inputs, inputs[:, :3].argmax(dim=1)))
    return batches


def fail() -> nn.Module:
    raise ZeroDivisionError("the user's own")


TASK = Task("task.py", build_model, build_data, loss_fn=nn.functional.cross_entropy)


class TestTorchOnCuda(BackendContract):
    device = "cuda"

    @pytest.fixture
    def subject(self) -> Subject:
        return Subject(registry.load("torch"), TASK, lambda: replace(TASK, build_model=fail))


def test_a_model_on_the_device_trains_with_a_scaler() -> None:
    model = build_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = apply_profile(FLOAT16, model=model, optimizer=optimizer)
    for inputs, targets in build_data(8)[:4]:
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(inputs.cuda()), targets.cuda())
        precision.backward(loss)
        assert precision.step()
    assert precision.skipped == 0


def test_events_time_steps_like_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps, timed by events and by the clock: a factor of milliseconds would show."""
    backend = registry.load("torch")
    session = backend.open(
        TASK, Recipe(batch_size=64), device="cuda", seed=0, report=lambda phase, step: None
    )
    made: list[object] = []
    maker = devices.event_maker(torch.device("cuda"))
    assert maker is not None
    monkeypatch.setattr(devices, "event_maker", lambda device: lambda: made.append(1) or maker())
    measured = session.time_steps(QUICK)
    monkeypatch.setattr(devices, "event_maker", lambda device: None)
    clocked = session.time_steps(QUICK)
    session.close()
    assert len(made) > measured.steps >= QUICK.min_steps
    assert len(made) >= measured.steps + measured.warmup_steps - 1
    assert 0.1 < measured.step_seconds / clocked.step_seconds < 10
    assert measured.low <= measured.step_seconds <= measured.high
    assert measured.peak_memory_bytes > 2**16


def train(recipe: Recipe, steps: int = 8) -> tuple[list[float], nn.Module]:
    """Train the small model by a recipe; return the losses and the model, restored."""
    torch.manual_seed(0)
    model = build_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with apply_profile(recipe, model=model, optimizer=optimizer) as precision:
        for inputs, targets in build_data(32)[:steps]:
            with precision.autocast():
                outputs = model(inputs.cuda())
            loss = nn.functional.cross_entropy(outputs, targets.cuda())
            precision.backward(loss)
            precision.step()
            losses.append(loss.item())
    return losses, model


def test_tf32_is_on_with_its_recipe_and_off_after_it() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    model = build_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with apply_profile(Recipe(policy=Policy.TF32), model=model, optimizer=optimizer):
        assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


@real_hardware
def test_tf32_rounds_products_where_the_hardware_has_it() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 begins with compute capability 8.0")
    torch.manual_seed(0)
    left, right = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    exact = left.double() @ right.double()
    model = build_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def error() -> float:
        return float((left @ right - exact).norm() / exact.norm())

    plain = error()
    with apply_profile(Recipe(policy=Policy.TF32), model=model, optimizer=optimizer):
        rounded = error()
    assert plain < 1e-6 < 1e-5 < rounded < 1e-2
    assert error() == plain


def test_a_real_overflow_skips_the_step_and_halves_the_scale() -> None:
    torch.manual_seed(0)
    model = build_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=2.0**30))
    precision = apply_profile(recipe, model=model, optimizer=optimizer)
    before = [parameter.clone() for parameter in model.parameters()]
    inputs, targets = build_data(32)[0]
    scales = []
    for _ in range(30):
        with precision.autocast():
            outputs = model(inputs.cuda())
        precision.backward(nn.functional.cross_entropy(outputs, targets.cuda()))
        stepped = precision.step()
        scales.append(precision.scaler.get_scale())
        if stepped:
            break
        assert all(map(torch.equal, model.parameters(), before))
    assert stepped
    assert precision.skipped >= 1
    assert scales[0] == 2.0**29
    assert not any(map(torch.equal, model.parameters(), before))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kept", [torch.float32, torch.float64])
def test_every_loss_that_is_not_finite_is_counted(kept: torch.dtype) -> None:
    """More of them than wait there together, of two dtypes, changed after they were given."""
    weight = nn.Parameter(torch.ones((), device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    model = nn.ParameterList([weight])
    precision = apply_profile(Recipe(batch_size=1), model=model, optimizer=optimizer)
    bad = {3: float("inf"), 63: float("nan"), 64: float("-inf"), 129: float("nan")}
    for step in range(130):
        loss = (weight + bad.get(step, 0.0)).to(kept if step % 3 == 0 else torch.float32)
        precision.backward(loss)
        with torch.no_grad():
            loss.zero_()
        precision.step()
    assert precision.nonfinite_losses == len(bad)
    assert precision.nonfinite_losses == len(bad), "counted once"


def test_what_comes_back_to_the_cpu_can_be_read_at_once() -> None:
    there = torch.arange(2.0**20, device="cuda") + 1
    assert torch.equal(move({"x": there}, "cpu")["x"], torch.arange(2.0**20) + 1)


@pytest.fixture
def limited() -> Iterator[int]:
    """So many bytes are left to this process; all again afterwards."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    budget = torch.cuda.memory_reserved() + 512 * MIB
    torch.cuda.set_per_process_memory_fraction(budget / total, 0)
    yield 512 * MIB
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    torch.cuda.empty_cache()


def test_too_much_memory_is_an_exception_after_which_less_fits(limited: int) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * limited, dtype=torch.uint8, device="cuda")
    held = torch.empty(limited // 4, dtype=torch.uint8, device="cuda")
    assert held.device.type == "cuda"


def test_a_process_is_held_to_what_is_free() -> None:
    devices.limit_memory(torch.device("cuda:0"))
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert 0 < free <= total


@real_hardware
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # the compiler has its own
@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16])
def test_a_compiled_recipe_trains_as_the_same_without_compiling(policy: Policy) -> None:
    recipe = Recipe(policy=policy, batch_size=32).with_policy(policy)
    plain, _ = train(recipe)
    compiled, _ = train(replace(recipe, compile=True))
    assert compiled == pytest.approx(plain, rel=2e-2)


def test_a_fused_optimizer_trains_as_the_plain_one() -> None:
    plain, one = train(Recipe(batch_size=32))
    fused, two = train(Recipe(batch_size=32, knobs={"fused_optimizer": True}))
    assert fused == pytest.approx(plain, rel=1e-4)
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_example_is_tuned_from_the_command_line_and_its_profile_trains(tmp_path: Path) -> None:
    profile = tmp_path / "digits.profile.yaml"
    words = ["tune", ROOT / "examples/torch/digits_mlp.py", "--device", "cuda", "--trials", 4]
    words += ["--rounds", 2, "--proof-seconds", 10, "--output", profile]
    words += ["--storage", tmp_path / "study.journal"]
    done = subprocess.run(
        [sys.executable, "-m", "autoprec", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = load_profile(profile)
    assert made.device.kind == "cuda"
    assert made.evidence.chosen.peak_memory_bytes > 0
    losses, _ = train(made.recipe)
    assert losses[-1] < losses[0]
