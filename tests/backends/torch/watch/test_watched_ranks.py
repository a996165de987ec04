"""Ranks that share a model check together and act alike: real processes, Gloo."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import apply_profile
from autoprec.backends.torch.apply.wrapping import distribute
from autoprec.backends.torch.distributed.sharding import whole
from autoprec.backends.torch.watch.check import Check
from autoprec.backends.torch.watch.watch import Watch
from autoprec.core.numerics.watching import CONFIRM_AFTER
from autoprec.core.recipe import Distributed
from autoprec.errors import AutoprecWarning
from benchmarks.numerics.late_breaks import BFLOAT16
from benchmarks.numerics.late_breaks_torch import batches, train
from tests.backends.torch.distributed.joined import on_two_ranks

pytestmark = [pytest.mark.torch, pytest.mark.scale]

ENGINES = ("ddp", "fsdp2")


class Angles(nn.Module):
    """Sines of what is given, times ten thousand where the second rank says so."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, given: torch.Tensor) -> Any:
        return self.last(torch.sin(self.first(given * self.factor)))


def trained(
    engine: Any, rank: int, watch: Any, *, accumulation: int = 2, factor: float = 1.0
) -> tuple[list[torch.Tensor], Any, list[str]]:
    recipe = replace(BFLOAT16, accumulation_steps=accumulation, distributed=Distributed(engine, 2))
    torch.manual_seed(0)
    model = distribute(recipe, Angles(factor), "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = apply_profile(recipe, model=model, optimizer=optimizer, watch=watch, watch_every=2)
    data = batches(seed=rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(8 * accumulation):
            inputs, targets = next(data)
            loss = nn.functional.mse_loss(precision.forward(inputs), targets)
            precision.backward(loss)
            precision.step()
    weights = [whole(p.detach()).clone() for p in model.parameters()]
    return weights, precision, [str(each.message) for each in said]


def work(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for engine in ENGINES:
        watched, precision, _ = trained(engine, rank, "warn")
        unwatched, _, _ = trained(engine, rank, False)
        found[f"{engine} equal"] = all(map(torch.equal, watched, unwatched))
        found[f"{engine} healthy"] = precision.watched
        factor = 1e4 if rank == 1 else 1.0
        _, precision, said = trained(engine, rank, "float32", accumulation=1, factor=factor)
        found[f"{engine} broken"] = precision.watched
        found[f"{engine} kept"] = precision.state_dict()["watch"]["float32_modules"]
        found[f"{engine} said"] = [each for each in said if "updates in" in each]
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return on_two_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_are_those_of_an_unwatched_training(both: Any, engine: str) -> None:
    for rank in both:
        assert rank[f"{engine} equal"]
        checks = rank[f"{engine} healthy"]
        assert len(checks) >= 4
        assert not any(each.problem or each.not_checked for each in checks), checks
        assert all((each.gradient or 0.0) > 0.0 for each in checks) is (engine == "ddp")


@pytest.mark.parametrize(
    ("undecided", "expected", "due"), [(True, math.inf, 1 + CONFIRM_AFTER), (False, 12.5, 12)]
)
def test_where_one_rank_asks_for_a_check_all_of_them_make_it(
    undecided: bool, expected: float, due: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that plan different checks would wait for each other."""

    def of_all_ranks(self: Watch, mine: Any) -> list[Any]:
        planned = isinstance(mine, tuple) and isinstance(mine[0], tuple)
        return [mine, ((False, False, undecided, False), expected)] if planned else [mine]

    monkeypatch.setattr(Watch, "_of_all_ranks", of_all_ranks)
    torch.manual_seed(0)
    precision, _ = train(Angles(), BFLOAT16, every=50, updates=12)
    assert [each.updates for each in precision.watched] == [1, due]


def test_where_one_ranks_part_of_the_weights_is_lost_no_rank_runs_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that ran a sharded model would wait for the one that does not."""

    def of_all_ranks(self: Watch, mine: Any) -> list[Any]:
        return [mine, ["elsewhere"]] if mine == [] else [mine]

    def no_run(self: Check) -> None:
        pytest.fail("the model was run")

    monkeypatch.setattr(Watch, "_of_all_ranks", of_all_ranks)
    monkeypatch.setattr(Check, "_first_comparison", no_run)
    torch.manual_seed(0)
    with pytest.warns(AutoprecWarning, match="weights are not finite in elsewhere"):
        precision, _ = train(Angles(), BFLOAT16, every=50, updates=60)
    assert precision.watched[-1].action


@pytest.mark.parametrize("engine", ENGINES)
def test_what_one_rank_finds_all_of_them_act_on(both: Any, engine: str) -> None:
    first, second = both
    assert not any(each.problem for each in first[f"{engine} broken"])
    assert any(each.problem for each in second[f"{engine} broken"])
    for rank in both:
        assert [each.action for each in rank[f"{engine} broken"] if each.action]
        assert len(rank[f"{engine} said"]) == 1
    assert first[f"{engine} kept"] == second[f"{engine} kept"] != []
    assert "another rank" in first[f"{engine} said"][0]
