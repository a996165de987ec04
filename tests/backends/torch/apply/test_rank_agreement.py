"""A recipe on a model that ranks share: what they agree on, what it changes, what it says."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from factories import profile_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoprec import apply_profile, distribute
from autoprec.core.device.merging import merge
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import Distributed, LossScale, Recipe
from autoprec.errors import AutoprecWarning, UsageError
from autoprec.hardware.catalogue import load_catalogue, profiles_folder
from autoprec.hardware.probes.observe import observe
from autoprec.profiles import save_profile
from benchmarks.recordings.machine_replay import RecordedMachine, read_recording
from tests.backends.torch.distributed.joined import on_two_ranks
from tests.backends.torch.operated import BFLOAT16, FLOAT16, FLOAT32, adam, apply, batches, mlp

pytestmark = [pytest.mark.torch, pytest.mark.scale]

DDP = Distributed("ddp", 2)
FSDP2 = Distributed("fsdp2", 2)
IN_BFLOAT16 = Distributed("fsdp2", 2, param_dtype=DType.BFLOAT16)


def heard(act: Callable[[], Any]) -> list[str]:
    """Return autoprec's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in caught if issubclass(each.category, AutoprecWarning)]


def reduced(ddp: nn.Module, rank: int) -> float:
    """Return the mean over the ranks of a gradient that bfloat16 cannot hold."""
    ddp.zero_grad(set_to_none=True)
    (ddp(torch.ones(1, 1)) * (1.0 + 2.0**-12)).backward()
    grad = next(ddp.parameters()).grad
    assert grad is not None
    return float(grad)


def hooks(rank: int) -> dict[str, Any]:
    """What of the reduction is rounded: before, under a profile, and after `restore`."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    rounded = Recipe(distributed=Distributed("ddp", 2, reduce_dtype=DType.BFLOAT16))
    found = [reduced(ddp, rank)]
    precision = apply(rounded, ddp, optimizer)
    found.append(reduced(ddp, rank))
    precision.restore()
    found.append(reduced(ddp, rank))
    own = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    own.register_comm_hook(None, allreduce_hook)
    return {
        "hooks": found,
        "own hook": heard(lambda: apply(rounded, own, adam(own))),
        "own hook, nothing to reduce": heard(lambda: apply(BFLOAT16, own, adam(own))),
    }


PROVEN: dict[str, tuple[Distributed | None, Recipe, Distributed, Recipe]] = {
    # how the model is wrapped, and the recipe that is applied to it
    "as proven, ddp": (DDP, BFLOAT16, DDP, BFLOAT16),
    "as proven, fsdp2": (IN_BFLOAT16, BFLOAT16, IN_BFLOAT16, BFLOAT16),
    "float32 for fsdp2 on ddp": (DDP, FLOAT32, FSDP2, FLOAT32),
    "float32 for ddp on fsdp2": (FSDP2, FLOAT32, DDP, FLOAT32),
    "autocast on fsdp2": (FSDP2, FLOAT32, DDP, BFLOAT16),
    "float32 on rounding fsdp2": (IN_BFLOAT16, BFLOAT16, FSDP2, FLOAT32),
    "fsdp2 on ddp": (DDP, FLOAT32, IN_BFLOAT16, BFLOAT16),
    "rounded reduction on exact fsdp2": (
        IN_BFLOAT16,
        BFLOAT16,
        replace(IN_BFLOAT16, reduce_dtype=DType.BFLOAT16),
        BFLOAT16,
    ),
}


def proofs(rank: int) -> dict[str, Any]:
    found = {}
    for name, (around, built, ranks, recipe) in PROVEN.items():
        model = distribute(replace(built, distributed=around), mlp())
        applied = replace(recipe, distributed=ranks)
        found[name] = heard(lambda m=model, r=applied: apply(r, m, adam(m)))  # type: ignore[misc]
    return found


#: What the two ranks' machines are, and the recipes tuned on each: a job on a mixed cluster.
MACHINES = ("amd-zen5.json", "intel-sapphire-rapids.json")
SCALED = Recipe(Policy.MIXED_FLOAT16, 16, loss_scale=LossScale(initial=1024.0))
MIXED: dict[str, tuple[Recipe, Recipe]] = {
    "agree": (replace(BFLOAT16, batch_size=8), replace(BFLOAT16, batch_size=16)),
    "policies": (BFLOAT16, FLOAT16),
    "scales": (SCALED, replace(SCALED, loss_scale=LossScale(initial=256.0))),
    "reductions": (
        replace(BFLOAT16, distributed=DDP),
        replace(BFLOAT16, distributed=replace(DDP, reduce_dtype=DType.BFLOAT16)),
    ),
}


def mixed(rank: int, recipes: tuple[Recipe, Recipe]) -> str | int:
    """Return the batch that this rank's own profile of a folder gives, or why all ranks stop."""
    recordings = profiles_folder() / "recordings"
    seen = [observe(RecordedMachine(read_recording(recordings / each))) for each in MACHINES]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        for machine, recipe, name in zip(seen, recipes, MACHINES, strict=True):
            cpu = machine.devices[0]
            place = merge(cpu, load_catalogue().family_of(cpu)).fingerprint
            made = profile_of(recipe, "torch", place, torch=torch.__version__)
            save_profile(made, Path(folder, name).with_suffix(".yaml"))
        model = distribute(Recipe(distributed=DDP), mlp())
        with mock.patch("autoprec.recipe_for_device.observe", return_value=seen[rank]):
            try:
                return apply_profile(folder, model=model, optimizer=adam(model)).batch_size
            except UsageError as error:
                assert not [m for m in model.modules() if "forward" in m.__dict__]
                return str(error)


def fused_over_parts(kind: Callable[..., torch.optim.Optimizer]) -> list[str]:
    """Train a step with the fused kernels of an optimizer of parts; return what was left out."""
    model = distribute(Recipe(distributed=FSDP2), mlp())
    optimizer = kind(model.parameters(), lr=0.1)
    fused = replace(FLOAT32, distributed=FSDP2, knobs={"fused_optimizer": True})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        precision = apply(fused, model, optimizer)
    ((inputs, targets),) = batches(1)
    precision.backward(nn.functional.cross_entropy(model(inputs), targets))
    assert precision.step()
    return [each.path for each in precision.report.skipped]


def work(rank: int) -> dict[str, Any]:
    found = hooks(rank) | proofs(rank)
    kinds = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
    found["fused"] = [fused_over_parts(kind) for kind in kinds]
    found["mixed"] = {name: mixed(rank, recipes) for name, recipes in MIXED.items()}
    model = distribute(Recipe(distributed=DDP), mlp())
    try:
        apply(replace((BFLOAT16, FLOAT16)[rank], distributed=DDP), model, adam(model))
    except UsageError as error:
        found["disagreement"] = str(error)
    changed = [m for m in model.modules() if "forward" in m.__dict__]
    four = Recipe(batch_size=8, accumulation_steps=1, distributed=Distributed("ddp", 4))
    precision: list[Any] = []
    found["of four"] = heard(lambda: precision.append(apply(four, model, adam(model))))
    fitted = precision[0].recipe
    return found | {"changed": len(changed), "fitted": [fitted.effective_batch, fitted.world_size]}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"))


def test_the_users_ddp_reduces_as_the_profile_says_until_it_is_restored(both: Any) -> None:
    exact = 1.0 + 2.0**-12
    for rank in both:
        assert rank["hooks"] == [exact, 1.0, exact]


def test_a_hook_of_the_users_own_stays_and_is_said_to(both: Any) -> None:
    for rank in both:
        (said,) = rank["own hook"]
        assert "reduce_dtype bfloat16 is not applied" in said
        assert rank["own hook, nothing to reduce"] == []


@pytest.mark.parametrize("case", PROVEN)
def test_what_rounds_elsewhere_than_in_the_proof_is_not_proven_here(both: Any, case: str) -> None:
    quiet = case.startswith(("as proven", "float32 for"))
    for rank in both:
        assert ["not checked here" in said for said in rank[case]] == ([] if quiet else [True])


def test_ranks_that_disagree_all_raise_the_same_and_apply_nothing(both: Any) -> None:
    first, second = (rank["disagreement"] for rank in both)
    assert first == second
    assert first.startswith("the ranks' profiles differ in policy and loss scale")
    assert "mixed_bfloat16" in first
    assert "mixed_float16" in first
    assert [rank["changed"] for rank in both] == [0, 0]


def test_of_sharded_parameters_only_what_torch_can_is_fused(both: Any) -> None:
    for rank in both:
        assert rank["fused"] == [[], [], ["SGD"], ["Adagrad"]]


def test_on_a_mixed_cluster_each_rank_takes_the_profile_of_its_own_device(both: Any) -> None:
    assert [rank["mixed"]["agree"] for rank in both] == [8, 16]


@pytest.mark.parametrize(
    ("case", "differs"),
    [
        ("policies", "policy and loss scale"),
        ("scales", "loss scale"),
        ("reductions", "reduce dtype"),
    ],
)
def test_profiles_of_a_folder_that_do_not_go_together_stop_all_ranks(
    both: Any, case: str, differs: str
) -> None:
    first, second = (rank["mixed"][case] for rank in both)
    assert first == second
    assert first.startswith(f"the ranks' profiles differ in {differs}, expected the same on all")


def test_another_number_of_ranks_keeps_the_effective_batch_and_says_how(both: Any) -> None:
    for rank in both:
        assert rank["fitted"] == [32, 2]
        (said,) = rank["of four"]
        assert "effective batch stays 32" in said


def test_a_profile_of_two_ranks_is_applied_in_one_process(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    model = mlp()
    with pytest.warns(AutoprecWarning, match="effective batch stays 64"):
        precision = apply(Recipe(batch_size=32, distributed=DDP), model, adam(model))
    assert (precision.batch_size, precision.accumulation_steps) == (32, 2)


def test_without_a_process_group_a_model_is_not_distributed() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        distribute(Recipe(distributed=DDP), mlp())
