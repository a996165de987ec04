"""Wraps a model as a recipe says: what the tuning measured and proved is what training gets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoprec.backends.torch.apply.float32_islands import module_at
from autoprec.backends.torch.apply.output_layers import find_output_layers
from autoprec.backends.torch.devices import resolve_device
from autoprec.backends.torch.distributed.reduction import set_reduce_dtype
from autoprec.backends.torch.dtypes import TORCH_DTYPES
from autoprec.core.dtypes import DType
from autoprec.core.recipe import Distributed, Recipe
from autoprec.errors import UsageError

_OF_RANKS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def distribute(recipe: Recipe, model: nn.Module, device: str | torch.device) -> nn.Module:
    """Return `model` shared over the ranks as `recipe.distributed` says; without it, by DDP.

    Under DistributedDataParallel that is a wrapper, under FSDP2 the model itself, changed in place:
    the optimizer must be made afterwards. All ranks start with rank 0's weights. The process group
    must exist. Raises `UsageError` for an engine that is not torch's.
    """
    ranks = recipe.distributed or Distributed()
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "there is no process group: call torch.distributed.init_process_group() first, in a "
            "script that torchrun starts"
        )
    place = resolve_device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)  # where FSDP2 puts parameters
    if ranks.engine == "ddp":
        return _replicated(model, ranks, place)
    if ranks.engine == "fsdp2":
        return _sharded(recipe, model, ranks, place)
    raise UsageError(
        f"engine {ranks.engine!r} given, expected one of PyTorch's: ddp, fsdp2; was the profile "
        "made for Keras?"
    )


def torch_dtype(dtype: DType | None) -> torch.dtype | None:
    """Return torch's dtype; None for none. `UsageError` where gradients cannot have it."""
    if dtype is None:
        return None
    if dtype not in _OF_RANKS:
        raise UsageError(f"dtype {dtype} given for ranks, expected one of {', '.join(_OF_RANKS)}")
    return TORCH_DTYPES[dtype]


def _replicated(model: nn.Module, ranks: Distributed, device: torch.device) -> nn.Module:
    ddp = DistributedDataParallel(
        model,
        device_ids=None if device.index is None else [device.index],
        bucket_cap_mb=ranks.bucket_mb,
    )
    set_reduce_dtype(ddp, hook_dtype(ranks))
    return ddp


def hook_dtype(ranks: Distributed) -> torch.dtype | None:
    """Return what a communication hook is needed for; None where gradients are not rounded."""
    return torch_dtype(ranks.reduce_dtype) if ranks.rounds_gradients else None


def _sharded(
    recipe: Recipe, model: nn.Module, ranks: Distributed, device: torch.device
) -> nn.Module:
    """Shard islands, blocks, then the rest: what is inside must be sharded before its parent.

    Batch norms keep their weights in float32, like their running statistics: kernels want both
    alike. Their inputs stay as they are, as under autocast.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(torch_dtype(ranks.param_dtype), torch_dtype(ranks.reduce_dtype))
    exact = MixedPrecisionPolicy(torch.float32, torch.float32)
    policies = {id(block): mixed for block in _blocks(model)} | {id(model): mixed}
    if ranks.param_dtype is not None:
        as_given = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
        policies |= {id(norm): as_given for norm in _norms_with_statistics(model)}
        policies |= {id(island): exact for island in _islands(recipe, model)}
    for module in reversed(list(model.modules())):  # children come after their parents
        if id(module) in policies and module is not model:
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=ranks.reshard_after_forward,
                mp_policy=policies[id(module)],
            )
    fully_shard(model, mesh=mesh, mp_policy=policies[id(model)])
    return model


def _islands(recipe: Recipe, model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that must keep float32 weights: those whose own code runs in float32."""
    for path in (*recipe.float32_modules, *find_output_layers(model)):
        module = module_at(model, path)
        if _can_be_sharded(module):
            yield module


def _norms_with_statistics(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the norms that keep running statistics, which are float32 whatever the policy."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None and _can_be_sharded(module):
            yield module


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated parts of a model: what stands in its outermost lists and sequences."""
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
            if _can_be_sharded(child):
                yield child
        else:
            yield from _blocks(child)


def _can_be_sharded(module: nn.Module) -> bool:
    """Return whether a module has weights of its own or below, and is called itself."""
    called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    return called and any(True for _ in module.parameters())
