"""A profile of a PyTorch task verified: as it was tuned, and with broken numerics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoprec import verify
from autoprec.api import tune
from autoprec.core.profile_claims import Verification

pytestmark = [pytest.mark.torch, pytest.mark.slow]

#: Rounds of a comparison; after each second one its processes are replaced, which takes seconds.
ROUNDS = 2

TASK = """
import torch
from torch import nn

BATCH_SIZE = 64

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 512), nn.Linear(512, 10)
        self.register_buffer("offset", torch.tensor(0.0))  # it grows, in a long training

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = (x + self.offset) - self.offset
        {changed}
        return self.last(x)

def build_model():
    return Net()

def build_data(batch_size):
    generator = torch.Generator().manual_seed(0)
    while True:
        y = torch.randint(10, (batch_size,), generator=generator)
        yield torch.randn(batch_size, 64, generator=generator) + y[:, None] / 5, y

loss_fn = nn.functional.cross_entropy
"""
BROKEN = "x = (x + 4096.0) - 4096.0"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    write(folder, "pass")
    tune(
        folder / "task.py",
        device="cpu",
        policies=("mixed_bfloat16",),
        trials=3,
        rounds=ROUNDS,
        proof_steps=30,
        extras=False,
        output=folder / "task.profile.yaml",
        storage=str(folder / "task.journal"),
    )
    return folder / "task.profile.yaml"


def write(folder: Path, changed: str) -> None:
    (folder / "task.py").write_text(TASK.format(changed=changed))


def verified(profile: Path, changed: str, **how: Path) -> Verification:
    write(profile.parent, changed)
    return verify(profile, device="cpu", rounds=ROUNDS, **how)


def test_what_was_tuned_trains_like_float32_again(profile: Path) -> None:
    """How fast it is on a machine that others use is no matter of a test."""
    found = verified(profile, "pass")
    results = {claim.name: claim.result for claim in found.claims}
    assert results["runs"] == results["numerics"] == "holds"
    assert found.speedup is not None
    assert found.parity is not None
    assert found.parity.steps == 30
    assert found.notes == ()


def test_broken_numerics_fail(profile: Path) -> None:
    found = verified(profile, BROKEN)
    assert "numerics" in [claim.name for claim in found.failed]
    assert "task.py has changed" in found.notes[0]


def test_numerics_that_break_late_fail_at_the_weights_of_a_checkpoint(profile: Path) -> None:
    saved = profile.with_name("last.pt")
    weights = {"offset": torch.tensor(4096.0)}
    for name, shape in (("first", (512, 64)), ("last", (10, 512))):
        weights[f"{name}.weight"] = 0.05 * torch.randn(shape, generator=torch.manual_seed(0))
        weights[f"{name}.bias"] = torch.zeros(shape[0])
    torch.save(weights, saved)
    found = verified(profile, "pass", checkpoint=saved)
    assert "numerics" in [claim.name for claim in found.failed]
