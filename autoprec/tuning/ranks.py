"""What a tuning on several ranks needs to know before it starts: devices, processors, the batch.

A rank is a process with one device of its own; on a CPU the ranks share the processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoprec.backends import registry
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.errors import TaskError, UsageError
from autoprec.workers.environment import outer_launcher

_THREADS = "OMP_NUM_THREADS"

#: Kinds of device on which ranks are started: those with a library that reduces their gradients
#: (Gloo, NCCL, RCCL).
_RANK_KINDS = (DeviceKind.CPU, DeviceKind.CUDA, DeviceKind.ROCM)


def devices_of_ranks(
    facts: DeviceFacts, peers: tuple[DeviceFacts, ...], nproc: int
) -> tuple[DeviceFacts, ...]:
    """Return the devices that `nproc` ranks use: `facts` first, then as many of its equal `peers`.

    Raises `UsageError` where there are too few, or where ranks are not started on such a device.
    """
    if nproc == 1:
        return (facts,)
    if facts.kind is DeviceKind.CPU:
        cores = usable_cores(facts.observation)
        if cores is not None and nproc > cores:
            raise UsageError(
                f"`nproc={nproc}` given, but this process may use {cores} processors, and "
                f"ranks that share one measure nothing: give `nproc={cores}` or less"
            )
        return (facts,)
    if facts.kind not in _RANK_KINDS:
        known = ", ".join(kind.value for kind in _RANK_KINDS)
        raise UsageError(
            f"`nproc={nproc}` given, but ranks are started on {known} only, not on {facts.kind}; "
            "leave `nproc` out"
        )
    devices = (facts, *peers)
    if nproc > len(devices):
        raise UsageError(
            f"`nproc={nproc}` given, but there are {len(devices)} devices here such as "
            f"{facts.name} ({facts.address}): give `nproc={len(devices)}` or less"
        )
    return devices[:nproc]


def usable_cores(observation: Observation) -> int | None:
    """Return the processors that this process may really use; None where that is not known."""
    quota = observation.core_quota
    whole = None if quota is None else max(1, math.floor(quota))
    return min((count for count in (whole, observation.usable_cores) if count), default=None)


def rank_threads(
    observation: Observation, nproc: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variable that gives each rank its share of a CPU; frameworks would take all.

    Where the user wants fewer threads, it is as many; what a launcher set is not the user's.
    """
    known = [count for count in (usable_cores(observation), observation.cores) if count]
    if nproc == 1 or observation.kind is not DeviceKind.CPU or not known:
        return {}
    share = max(1, min(known) // nproc)
    asked = environment.get(_THREADS, "")
    if asked.isascii() and asked.isdigit() and outer_launcher(environment) is None:
        share = min(share, max(1, int(asked)))
    return {_THREADS: str(share)}


def check_engine(framework: str, engine: str, nproc: int) -> None:
    """Raise `UsageError` where a framework's models are not trained on ranks, or not so."""
    known = registry.capabilities(framework)
    if nproc == 1 or engine in known.rank_engines:
        return
    if not known.rank_engines:
        raise UsageError(
            f"`nproc={nproc}` given, but {known.title} trains on several devices in one process "
            "(tf.distribute), see docs/scale.md; leave `nproc` out"
        )
    raise UsageError(
        f"`engine={engine}` given, expected one of {known.title}'s: {', '.join(known.rank_engines)}"
    )


def batch_of_rank(batch_size: int, nproc: int) -> int:
    """Return a rank's part of BATCH_SIZE, which is the batch of all ranks together."""
    if batch_size % nproc:
        raise TaskError(
            f"BATCH_SIZE = {batch_size} is the batch of all ranks together and cannot be divided "
            f"among {nproc}: give `nproc` a divisor of it, or change BATCH_SIZE"
        )
    return batch_size // nproc


def check_device_choice(device: str | None, nproc: int) -> None:
    """Raise `UsageError` where one device is named and several are needed."""
    kind, colon, _ = (device or "").partition(":")
    if nproc > 1 and colon and kind.strip().lower() != DeviceKind.CPU:
        raise UsageError(
            f"`device={device}` names one device and `nproc={nproc}` needs {nproc}: give "
            f"`device={kind}`; to leave out the first ones, set a variable such as "
            "CUDA_VISIBLE_DEVICES"
        )


def peers_of(facts: DeviceFacts, devices: Sequence[DeviceFacts]) -> tuple[DeviceFacts, ...]:
    """Return the other devices here that a profile could not tell from this one."""
    same = (each for each in devices if each.fingerprint == facts.fingerprint)
    return tuple(each for each in same if each.address != facts.address)
