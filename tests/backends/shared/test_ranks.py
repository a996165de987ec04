"""A rank's place among the others: whose recipe it takes, and which micro-batches are its own."""

from __future__ import annotations

import pytest

from autoprec.backends.shared.ranks import ALONE, Ranks
from autoprec.core.dtypes import DType
from autoprec.core.recipe import Distributed, Recipe
from autoprec.errors import UsageError

DDP = Distributed("ddp", 3)


def test_a_process_alone_agrees_with_itself_and_takes_every_batch() -> None:
    assert ALONE.agree(0.25) == 0.25
    assert [ALONE.global_index(index) for index in range(3)] == [0, 1, 2]
    recipe = Recipe(batch_size=8)
    assert ALONE.shared(recipe) == recipe


def test_the_ranks_take_every_micro_batch_once() -> None:
    ranks = [Ranks(rank, 3, DDP) for rank in range(3)]
    taken = [each.global_index(index) for index in range(4) for each in ranks]
    assert taken == list(range(12))


def test_a_recipe_that_says_nothing_of_ranks_is_run_as_they_share_float32() -> None:
    assert Ranks(1, 3, DDP).shared(Recipe(batch_size=8)).distributed == DDP
    rounded = Recipe(distributed=Distributed("ddp", 3, reduce_dtype=DType.BFLOAT16))
    assert Ranks(1, 3, DDP).shared(rounded) is rounded


@pytest.mark.parametrize("ranks", [ALONE, Ranks(0, 3, DDP)])
def test_a_recipe_for_another_number_of_ranks_is_refused(ranks: Ranks) -> None:
    expected = f"a recipe for 2 ranks given, expected one for {ranks.world_size}"
    with pytest.raises(UsageError, match=expected):
        ranks.shared(Recipe(distributed=Distributed("ddp", 2)))
