"""What applying a recipe to a model that ranks share takes, beside what one process needs.

The number of ranks, their agreement, the dtype of the reduction, and what of the proof does not
hold here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from autoprec.backends.torch.apply.wrapping import hook_dtype
from autoprec.backends.torch.distributed.gradient_sync import find_ddps
from autoprec.backends.torch.distributed.reduction import set_reduce_dtype
from autoprec.backends.torch.distributed.sharding import sharded_modules
from autoprec.backends.torch.dtypes import dtype_name
from autoprec.core.parallel.agreement import RankRecipe, disagreement
from autoprec.core.parallel.effective_batch import fit_to_world_size
from autoprec.core.recipe import Distributed, Recipe
from autoprec.errors import UsageError


def fit_to_ranks(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe for as many ranks as train here, and what that changed, as warnings.

    One that says nothing of ranks stays as it is.
    """
    here = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if recipe.distributed is None or recipe.world_size == here:
        return recipe, ()
    fitted, said = fit_to_world_size(recipe, here)
    return fitted, () if said is None else (said,)


def require_agreement(recipe: Recipe, model: nn.Module, device: str) -> None:
    """Raise the same `UsageError` on all ranks unless their recipes go together.

    Only ranks that share the model already are asked: all of them are here.
    """
    if not (find_ddps(model) or sharded_modules(model)) or dist.get_world_size() == 1:
        return
    found: list[RankRecipe] = [RankRecipe(device, recipe)] * dist.get_world_size()
    dist.all_gather_object(found, RankRecipe(device, recipe))
    wrong = disagreement(found)
    if wrong:
        raise UsageError(wrong)


def set_reduction(recipe: Recipe, model: nn.Module) -> tuple[str, ...]:
    """Reduce the gradients of a model in DDP as the recipe says; return what does not go.

    FSDP2's reduction is part of `fully_shard`.
    """
    ranks = recipe.distributed
    dtype = None if ranks is None else hook_dtype(ranks)
    done = [set_reduce_dtype(ddp, dtype) for ddp in find_ddps(model)]
    if all(done) or ranks is None:
        return ()
    return (
        f"reduce_dtype {ranks.reduce_dtype} is not applied: the model has a communication hook of "
        "its own, which cannot be replaced; leave register_comm_hook out",
    )


def release_reduction(model: nn.Module) -> None:
    """Reduce gradients in their own dtype again; our hook stays, for DDP gives none back."""
    for ddp in find_ddps(model):
        set_reduce_dtype(ddp, None)


def unproven(recipe: Recipe, model: nn.Module) -> Iterator[str]:
    """Say where what was proven is not what this model computes: other roundings, or elsewhere.

    Where neither rounds anything there is nothing to prove, whatever the engine.
    """
    ranks = recipe.distributed or Distributed()
    sharded = sharded_modules(model)
    here = _roundings_in_force(sharded)
    proven = _roundings([(ranks.param_dtype, ranks.reduce_dtype)] * (ranks.engine == "fsdp2"))
    if (ranks.engine == "fsdp2") == bool(sharded):
        if here == proven:
            return
    elif not (recipe.policy.mixed or ranks.rounds_gradients or here or proven):
        return
    yield (
        f"not checked here: the profile was checked with {_title(ranks.engine, proven)}, and this "
        f"model trains with {_title('fsdp2' if sharded else 'ddp', here)}. Tune with this engine, "
        "or wrap the model with autoprec.distribute(profile, model)"
    )


def _roundings_in_force(sharded: Sequence[Any]) -> set[str]:
    """Return how `fully_shard` was told to round."""
    policies = [module._get_fsdp_state()._mp_policy for module in sharded]
    return _roundings((each.param_dtype, each.reduce_dtype) for each in policies)


def _roundings(dtypes: Iterable[tuple[object, object]]) -> set[str]:
    """Name what parameters are gathered, and gradients reduced in, where that is not float32.

    A reduction of which nothing is said is in the dtype that parameters are gathered in.
    """
    found = set()
    for pair in dtypes:
        names = [dtype_name(dtype) for dtype in pair]
        gathered, reduced = names[0], names[1] if pair[1] is not None else names[0]
        if (gathered, reduced) != ("float32", "float32"):
            found.add(f"parameters in {gathered} and gradients in {reduced}")
    return found


def _title(engine: str, roundings: set[str]) -> str:
    """Describe an engine and what it rounds beside autocast."""
    known = {"fsdp2": "FSDP2", "ddp": "autocast in whole replicas"}
    return " and ".join([known.get(engine, engine), *sorted(roundings)])
