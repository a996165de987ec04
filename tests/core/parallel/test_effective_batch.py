"""A recipe keeps its effective batch at any number of devices that can share it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.dtypes import Policy
from autoprec.core.parallel.effective_batch import fit_to_world_size
from autoprec.core.recipe import Distributed, LossScale, Recipe
from autoprec.errors import UsageError

sections = st.none() | st.builds(
    Distributed,
    engine=st.sampled_from(["ddp", "fsdp2", "mirrored"]),
    world_size=st.integers(1, 64),
    bucket_mb=st.integers(1, 100),
)
recipes = st.builds(
    Recipe,
    policy=st.sampled_from([Policy.FLOAT32, Policy.MIXED_FLOAT16]),
    batch_size=st.integers(1, 300),
    accumulation_steps=st.integers(1, 20),
    float32_modules=st.sampled_from([(), ("head",)]),
    loss_scale=st.sampled_from([None, LossScale(initial=64.0)]),
    distributed=sections,
)


def recipe(batch_size: int, accumulation_steps: int, tuned_at: int | None) -> Recipe:
    section = None if tuned_at is None else Distributed(engine="ddp", world_size=tuned_at)
    return Recipe(batch_size=batch_size, accumulation_steps=accumulation_steps, distributed=section)


@given(recipes, st.integers(1, 64))
def test_the_effective_batch_is_kept_wherever_the_devices_can_share_it(before, world_size):
    after, said = fit_to_world_size(before, world_size)
    assert after.world_size == world_size
    assert after.batch_size <= before.batch_size
    if before.effective_batch % world_size == 0:
        assert after.effective_batch == before.effective_batch
        assert said is None or said.endswith(f"effective batch stays {before.effective_batch}")
    else:
        assert after.batch_size == before.batch_size
        assert after.effective_batch != before.effective_batch
        assert said is not None
        for part in (str(before.effective_batch), str(after.effective_batch), "learning rate"):
            assert part in said


@given(recipes, st.integers(1, 64))
def test_nothing_else_of_a_recipe_changes(before, world_size):
    after, _ = fit_to_world_size(before, world_size)
    for name in ("policy", "float32_modules", "loss_scale", "alignment", "knobs", "forced"):
        assert getattr(after, name) == getattr(before, name)
    if before.distributed is not None:
        assert after.distributed is not None
        assert after.distributed.engine == before.distributed.engine
        assert after.distributed.bucket_mb == before.distributed.bucket_mb


@given(recipes, st.integers(1, 64))
def test_the_batch_of_a_device_shrinks_only_where_it_must_and_no_further(before, world_size):
    after, _ = fit_to_world_size(before, world_size)
    share, rest = divmod(before.effective_batch, world_size)
    larger = range(after.batch_size + 1, before.batch_size + 1)
    assert rest or all(share % size for size in larger)


@given(recipes)
def test_where_it_was_tuned_nothing_changes(before):
    assert fit_to_world_size(before, before.world_size) == (before, None)


@given(recipes, st.integers(1, 64))
def test_a_fitted_recipe_fits(before, world_size):
    after, _ = fit_to_world_size(before, world_size)
    assert fit_to_world_size(after, world_size) == (after, None)


@pytest.mark.parametrize(
    ("before", "world_size", "expected"),
    [
        (recipe(8, 4, 2), 1, (8, 8)),  # more accumulation
        (recipe(8, 4, 2), 4, (8, 2)),  # less
        (recipe(8, 4, None), 4, (8, 1)),
        (recipe(32, 1, None), 2, (16, 1)),  # nothing left to accumulate: a smaller batch
        (recipe(8, 3, None), 2, (6, 2)),  # 12 a device: 6 twice rather than 4 three times
        (recipe(7, 1, 4), 2, (7, 2)),
        (recipe(32, 1, None), 3, (32, 1)),  # 32 is no multiple of 3: 96
        (recipe(10, 10, None), 3, (10, 3)),  # 100 is no multiple of 3: 90, not 120
        (recipe(1, 1, None), 2, (1, 1)),
    ],
)
def test_how_the_effective_batch_is_split(before, world_size, expected):
    after, _ = fit_to_world_size(before, world_size)
    assert (after.batch_size, after.accumulation_steps) == expected


def test_one_sentence_says_what_changed():
    _, said = fit_to_world_size(recipe(8, 3, 1), 2)
    assert said == (
        "a recipe for 1 rank is applied to 2 with batch_size 6 instead of 8 and "
        "accumulation_steps 2 instead of 3, so that the effective batch stays 24"
    )
    _, said = fit_to_world_size(Recipe(batch_size=32), 3, Distributed(engine="mirrored"))
    assert said == (
        "a recipe for 1 replica is applied to 3; 3 cannot share the effective batch of 32 "
        "equally, so it is 96 now, and the learning rate is yours to adapt"
    )


@pytest.mark.parametrize(
    ("engine", "world_size", "count"),
    [("ddp", 2, "2 ranks"), ("fsdp2", 1, "1 rank"), ("mirrored", 2, "2 replicas")],
)
def test_what_trains_is_named_as_its_framework_does(engine, world_size, count):
    section = Distributed(engine=engine, world_size=world_size)
    _, said = fit_to_world_size(Recipe(distributed=section), 4)
    assert said.startswith(f"a recipe for {count} is applied to 4")


def test_a_recipe_of_one_process_gets_the_given_section_and_none_on_one_device():
    engine = Distributed(engine="mirrored", bucket_mb=1)
    after, _ = fit_to_world_size(recipe(8, 2, None), 2, engine)
    assert after.distributed == Distributed(engine="mirrored", bucket_mb=1, world_size=2)
    assert fit_to_world_size(recipe(8, 2, None), 1, engine)[0].distributed is None
    kept, _ = fit_to_world_size(recipe(8, 2, 4), 2, engine)
    assert kept.distributed == Distributed(engine="ddp", world_size=2)


def test_a_world_without_devices_is_refused():
    with pytest.raises(UsageError, match="world_size: 0 given, expected at least 1"):
        fit_to_world_size(Recipe(), 0)
