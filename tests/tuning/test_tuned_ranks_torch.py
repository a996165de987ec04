"""A profile tuned on two ranks with PyTorch, applied in one process and on four ranks."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Profile, apply_profile, distribute, load_profile
from autoprec.api import tune
from autoprec.errors import AutoprecWarning
from tests.backends.torch.distributed.joined import on_ranks
from tests.backends.torch.distributed.rank_tasks import write_task

pytestmark = [pytest.mark.torch, pytest.mark.scale, pytest.mark.slow]

BATCH = 16


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tune a task on two ranks; return the profile's file."""
    folder = tmp_path_factory.mktemp(f"tuned_{request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoprec.probing.measure_device", lambda facts, frameworks: facts)
        tune(
            write_task(folder / "task.py", more=f"BATCH_SIZE = {BATCH}"),
            device="cpu",
            nproc=2,
            engine=request.param,
            policies=("mixed_bfloat16",),
            trials=3,
            rounds=1,
            proof_steps=16,
            extras=False,
            accept_drift=True,
            storage=str(folder / "task.journal"),
            output=folder / "task.profile.yaml",
        )
    return folder / "task.profile.yaml"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def train(profile: Path, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Apply the profile as a script of this many ranks does, and train two updates."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = net() if ranks == 1 else distribute(str(profile), net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        precision = apply_profile(profile, model=model, optimizer=optimizer)
    data = torch.Generator().manual_seed(1 + rank)
    steps = 0
    for _ in range(2 * precision.accumulation_steps):
        inputs = torch.randn(precision.batch_size, 6, generator=data)
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(inputs), inputs.argmax(-1) % 3)
        precision.backward(loss)
        steps += precision.step()
    said = [str(each.message) for each in caught if issubclass(each.category, AutoprecWarning)]
    whole = {
        name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()
    }
    return {
        "batch": [precision.batch_size, precision.accumulation_steps, precision.recipe.world_size],
        "steps": steps,
        "said": [text for text in said if "tuning was inconclusive" not in text],  # as it may be
        "weights": [weight.detach().clone() for weight in whole.values()],
    }


def effective(found: dict[str, Any]) -> int:
    batch, accumulation, ranks = found["batch"]
    return int(batch * accumulation * ranks)


def test_it_is_for_two_ranks_and_proven_there(tuned: Path) -> None:
    profile: Profile = load_profile(tuned)
    ranks = profile.recipe.distributed
    assert ranks is not None
    assert ranks.world_size == 2
    assert profile.recipe.effective_batch >= BATCH
    assert "checked at 2 ranks" in profile.evidence.parity.reason


def test_on_two_ranks_it_is_applied_as_tuned(tuned: Path, tmp_path: Path) -> None:
    recipe = load_profile(tuned).recipe
    for found in on_ranks(2, partial(train_on, tuned, 2), tmp_path):
        assert found["batch"] == [recipe.batch_size, recipe.accumulation_steps, 2]
        assert found["said"] == []


@pytest.mark.parametrize("ranks", [1, 4])
def test_on_another_number_the_effective_batch_stays_and_is_said_to(
    tuned: Path, tmp_path: Path, ranks: int
) -> None:
    whole = load_profile(tuned).recipe.effective_batch
    if ranks == 1:
        everywhere = [train(tuned)]
    else:
        everywhere = on_ranks(ranks, partial(train_on, tuned, ranks), tmp_path)
    for found in everywhere:
        assert effective(found) == whole
        assert found["steps"] == 2
        said = "\n".join(found["said"])
        assert f"a recipe for 2 ranks is applied to {ranks}" in said
        assert f"the effective batch stays {whole}" in said
        torch.testing.assert_close(found["weights"], everywhere[0]["weights"])
    start = list(net().parameters())
    assert not torch.equal(everywhere[0]["weights"][0], start[0])


def train_on(profile: Path, ranks: int, rank: int) -> dict[str, Any]:
    return train(profile, rank, ranks)
