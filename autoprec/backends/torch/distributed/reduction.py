"""In which dtype DistributedDataParallel reduces gradients: a communication hook of our own.

torch's `bf16_compress_hook` refuses Gloo. This one serves every dtype and backend, and since a hook
cannot be removed, its dtype can be changed: without one it reduces as DDP does by itself.
"""

# DDP compares the annotations of a hook with classes, so that they must not be strings here.

import weakref
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@dataclass
class ReduceDtype:
    """What a hook reduces in; None: in the gradients' own dtype."""

    group: dist.ProcessGroup
    dtype: torch.dtype | None = None


_REGISTERED: weakref.WeakKeyDictionary[DistributedDataParallel, ReduceDtype] = (
    weakref.WeakKeyDictionary()
)


def set_reduce_dtype(ddp: DistributedDataParallel, dtype: torch.dtype | None) -> bool:
    """Reduce the gradients of `ddp` in `dtype` from now on; None: in their own.

    Returns whether that is so: False where it has a communication hook that is not ours.
    """
    state = _REGISTERED.get(ddp)
    if state is None:
        if dtype is None:
            return True
        if getattr(ddp, "_comm_hooks", ()):
            return False
        state = _REGISTERED[ddp] = ReduceDtype(ddp.process_group)
        ddp.register_comm_hook(state, average_bucket)
    state.dtype = dtype
    return True


def average_bucket(
    state: ReduceDtype,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, rounded to the state's dtype on their way.

    They are divided before they are summed, so that the sum overflows no earlier than a gradient.
    """
    gradients = bucket.buffer()
    dtype = state.dtype if state.dtype and gradients.is_floating_point() else gradients.dtype
    sent = gradients.to(dtype).div_(state.group.size())
    work = dist.all_reduce(sent, group=state.group, async_op=True)

    def received(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return cast(torch.Tensor, gradients.copy_(future.value()[0]))

    arrived: torch.futures.Future[torch.Tensor] = work.get_future().then(received)
    return arrived
