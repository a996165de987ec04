"""Two ranks, as under torchrun: one reduction for each update, and they agree or all raise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from autoprec import Recipe, apply_profile
from tests.code_blocks import ROOT
from tests.fork_server import ForkServer

pytestmark = [pytest.mark.release, pytest.mark.slow]

TRAINERS = ("lightning", "accelerate")


SCRIPT = ROOT / "tests/integrations/two_ranks.py"
Ranks = Callable[[str, str, Path], list[dict[str, Any]]]


def found_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture
def two_ranks(with_trainers: ForkServer) -> Ranks:
    """Run two ranks that are told what torchrun tells them, its store among it."""

    def run(trainer: str, what: str, folder: Path) -> list[dict[str, Any]]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
        known |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
        known |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}

        def start(rank: str) -> subprocess.CompletedProcess[str]:
            own = {**os.environ, **known, "RANK": rank, "LOCAL_RANK": rank}
            own["CUDA_VISIBLE_DEVICES"] = ""
            return with_trainers.run(SCRIPT, trainer, what, folder, environment=own)

        assert with_trainers.pid  # it runs before two threads ask for it
        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(start, "01"))
        assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
        return found_in(folder)

    return run


def by_torchrun(trainer: str, what: str, folder: Path) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*command, "--nproc-per-node", "2", str(SCRIPT), trainer, what, str(folder)],
        env=environment,
        capture_output=True,
        timeout=280,
        check=True,
    )
    return found_in(folder)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_ranks_train_as_one_process_with_the_whole_batch(
    trainer: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    """Accelerate's, which are imported sooner, are started by torchrun itself."""
    from tests.integrations import two_ranks as script

    torch.manual_seed(0)
    model = script.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in DataLoader(script.data(), batch_size=32):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    start = by_torchrun if trainer == "accelerate" else two_ranks
    found = start(trainer, "training", tmp_path)
    assert found[0]["weights"] == found[1]["weights"]
    for weights, parameter in zip(found[0]["weights"], model.parameters(), strict=True):
        torch.testing.assert_close(
            torch.tensor(weights), parameter.detach().flatten(), rtol=1e-5, atol=1e-6
        )
    assert [each["reduced"] for each in found] == [2, 2]  # two updates, one bucket
    assert [each["steps"] for each in found] == [2, 2]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_overflow_on_one_rank_skips_the_update_on_both(
    trainer: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    found = two_ranks(trainer, "overflow", tmp_path)
    assert [each["skipped"] for each in found] == [1, 1]
    assert [each["steps"] for each in found] == [1, 1]
    assert found[0]["weights"] == found[1]["weights"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_ranks_with_other_profiles_all_raise(
    trainer: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    errors = [each["error"] for each in two_ranks(trainer, "disagreement", tmp_path)]
    assert errors[0] == errors[1]
    assert "policy" in errors[0]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_sharded_ranks_train_as_one_process(trainer: str, tmp_path: Path, two_ranks: Ranks) -> None:
    """FSDP2: in float32 exactly, with an island in bfloat16 as far as its rounding allows."""
    from tests.integrations import two_ranks as script

    for what, tolerance in (("sharded float32", 1e-5), ("sharded", 1e-2)):
        (folder := tmp_path / what.replace(" ", "-")).mkdir()
        found = two_ranks(trainer, what, folder)
        assert found[0]["weights"] == found[1]["weights"]
        assert [each["steps"] for each in found] == [8, 8]
        torch.manual_seed(0)
        model = script.Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = script.recipe_for("alone") if what == "sharded" else Recipe(batch_size=8)
        precision = apply_profile(recipe, model=model, optimizer=optimizer, watch=False)
        for inputs, targets in DataLoader(script.data(), batch_size=8):
            precision.backward(nn.functional.cross_entropy(precision.forward(inputs), targets))
            precision.step()
        for weights, parameter in zip(found[0]["weights"], model.parameters(), strict=True):
            torch.testing.assert_close(
                torch.tensor(weights), parameter.detach().flatten(), rtol=tolerance, atol=tolerance
            )
        assert [each["checks"] for each in found] == (
            [[["", ""]]] * 2 if what == "sharded" else [[], []]
        )
