"""Which operators take the time of a step, and in what precision each of them runs.

One pass of torch's profiler over one update. It counts an operator's own time: on a GPU that of the
kernels it launched, on a CPU its own code. Compiled code appears under the names of its kernels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from autoprec.backends.torch import devices
from autoprec.core.measurement import OperatorTime

_UPDATE = "autoprec.update"

_FLOATS = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "c10::Float8_e4m3fn": "float8",
    "c10::Float8_e5m2": "float8",
}

#: What runs operators and is none.
_AROUND = re.compile(r"(torch::)?autograd::|\w+Backward\d*$|ProfilerStep|cuda[A-Z]|hip[A-Z]|\[")

#: Times below this share of the step are left out.
_SMALLEST_SHARE = 1e-3


def operator_times(
    compute: Callable[[], None], update: Callable[[], None], device: torch.device
) -> tuple[OperatorTime, ...]:
    """Profile `compute`, the forward and backward passes, and `update`; the slowest come first."""
    accelerated = device.type != "cpu"
    activities = [ProfilerActivity.CPU]
    if accelerated:
        activities.append(ProfilerActivity[device.type.upper()])
    devices.synchronize(device)
    with profile(activities=activities, record_shapes=True) as found:
        compute()
        with record_function(_UPDATE):
            update()
        devices.synchronize(device)
    microseconds: dict[tuple[str, str, bool], float] = defaultdict(float)
    for event in found.events() or ():
        own = event.self_device_time_total if accelerated else event.self_cpu_time_total
        if own > 0 and _is_operator(event):
            microseconds[event.name, _dtype(event), _is_part_of_update(event)] += own
    whole = sum(microseconds.values())
    operators = (
        OperatorTime(name, dtype, own / whole, updates)
        for (name, dtype, updates), own in microseconds.items()
        if own >= _SMALLEST_SHARE * whole
    )
    return tuple(sorted(operators, key=lambda operator: -operator.share))


def _is_operator(event: Any) -> bool:
    """Say whether an event is an operator: not a kernel, which counts for the one it belongs to."""
    on_host = event.device_type == DeviceType.CPU
    return on_host and not event.is_user_annotation and not _AROUND.match(event.name)


def _dtype(event: Any) -> str:
    """Return what an operator's floating-point inputs are kept in: "" without any or several."""
    found = {_FLOATS[name] for name in event.input_dtypes or () if name in _FLOATS}
    return found.pop() if len(found) == 1 else ""


def _is_part_of_update(event: Any) -> bool:
    while event is not None and event.name != _UPDATE:
        event = event.cpu_parent
    return event is not None
