"""A Ray cluster: nodes are probed by tasks, and a tuning is an actor that reserves its node.

Ray restarts nothing here (`max_restarts=0`): the driver decides, for it has the journal. Nodes load
this file, too, where Ray need not be imported to do so.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoprec.core.device.observation import DeviceKind
from autoprec.core.fleet.node_types import NodeReport
from autoprec.errors import FrameworkMissing, UsageError
from autoprec.fleet.messages import Message, NodeLost, NoRoom, Request
from autoprec.fleet.node import answer, probe_node

_CONNECT_SECONDS = 10.0

#: Longer than every probe of a machine takes together, plus the start of a Ray worker.
_PROBE_SECONDS = 150.0

#: A Ray worker starts within seconds; an actor that has not started by then waits for room.
ROOM_SECONDS = 30.0

#: How long the actor waits for a message before it answers that there is none.
_MESSAGE_SECONDS = 5.0

#: Ray hides the GPUs that a task has not reserved; a probe must see all, a tuning chooses itself.
_SHOW_ALL_DEVICES = {
    f"RAY_EXPERIMENTAL_NOSET_{name}": "1"
    for name in (
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "TPU_VISIBLE_CHIPS"),
    )
}

#: Libraries start so many threads; Ray sets it to the CPUs a task or actor reserves.
_THREADS_VARIABLE = "OMP_NUM_THREADS"

#: What Ray calls a kind of device that it counts besides CPUs.
_RESOURCE_OF = {DeviceKind.TPU: "TPU", DeviceKind.CPU: ""}


def _import_ray() -> Any:
    """Import Ray; raise `FrameworkMissing` with what to install if it is not there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise FrameworkMissing(
            "`ray`: Ray is not installed here; install it, here and on the nodes, with "
            "`pip install 'autoprec[ray]'`"
        ) from error
    return ray


class RayScheduler:
    """The Ray cluster at an address: "auto" is RAY_ADDRESS, else the one this machine belongs to.

    With `wait`, nodes that have no room are waited for.
    """

    def __init__(self, address: str = "auto", *, wait: bool = False) -> None:
        self._ray = _import_ray()
        if address == "auto":  # as Ray does
            address = os.environ.get("RAY_ADDRESS") or address
        self._address, self._wait = address, wait
        self._connected = False

    def __enter__(self) -> RayScheduler:
        if self._ray.is_initialized():  # by the program that tunes; it stays as it was
            return self
        host, colon, port = self._address.removeprefix("ray://").rpartition(":")
        try:
            if colon and port.isdigit():  # if nothing listens, Ray tries again for minutes
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
            self._ray.init(
                address=self._address,
                namespace="autoprec",
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": _SHOW_ALL_DEVICES},
            )
        except (OSError, ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
            given = "`ray` given, but this machine belongs to no Ray cluster"
            if self._address != "auto":
                first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
                given = f"`ray={self._address}` given, but no Ray cluster answers there: {first}"
            raise UsageError(
                f"{given}. Start one with `ray start --head`, and give its address or run this on "
                "one of its machines"
            ) from error
        self._connected = True
        return self

    def __exit__(self, *exception: object) -> None:
        if self._connected:
            self._ray.shutdown()

    def probe(self, request: Request) -> Sequence[NodeReport]:
        """Probe every node that is alive; nodes of one machine are named by their ids, too."""
        task = self._ray.remote(num_cpus=0, max_retries=0)(probe_node)
        hosts = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in self._alive()}
        asked = {
            node: task.options(scheduling_strategy=_only_on(node)).remote(request) for node in hosts
        }
        self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=_PROBE_SECONDS)
        reports = []
        for node, reference in asked.items():
            several = list(hosts.values()).count(hosts[node]) > 1
            name = f"{hosts[node]}/{node[:8]}" if several else hosts[node]
            reports.append(replace(self._report(reference), node=node, name=name))
        return reports

    def _report(self, reference: Any) -> NodeReport:
        errors = self._ray.exceptions
        try:
            report: NodeReport = self._ray.get(reference, timeout=0.1)
        except errors.GetTimeoutError:
            problem = f"its probe did not answer in {_PROBE_SECONDS:g} seconds"
        except errors.RayError as error:
            problem = f"its probe failed: {_last_line(error)}"
            if "No module named 'autoprec" in str(error):
                problem = "autoprec is not installed there; install the same version as here"
        else:
            return report
        return NodeReport(node="", name="", problem=problem)

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def start(self, node: NodeReport, request: Request) -> RaySession:
        """Begin a tuning in an actor that reserves all CPUs and devices of its node."""
        there = next((each for each in self._alive() if each["NodeID"] == node.node), None)
        if there is None:
            raise NodeLost("the node has left the cluster", gone=True)
        kind = None if request.fingerprint is None else request.fingerprint.kind
        resource = "GPU" if kind is None else _RESOURCE_OF.get(kind, "GPU")
        reserved = {name: there["Resources"].get(name, 0.0) for name in ("CPU", resource) if name}
        cpus, gpus = reserved.pop("CPU"), reserved.pop("GPU", 0.0)
        if cpus < 1:
            raise NoRoom("Ray counts no CPU on it")
        actor = self._ray.remote(TuningActor).options(
            num_cpus=cpus,
            num_gpus=gpus,
            resources={name: count for name, count in reserved.items() if count},
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=_only_on(node.node),
        )
        return RaySession(self._ray, node.node, actor.remote(request.to_line()), self._wait)


def _only_on(node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class RaySession:
    """A tuning in an actor."""

    def __init__(self, ray: Any, node: str, actor: Any, wait: bool) -> None:
        self._ray, self._node, self._actor, self._wait = ray, node, actor, wait
        self._began, self._started = time.monotonic(), False
        self._pending = actor.start.remote()

    def receive(self) -> Sequence[Message]:
        """Return what has arrived, without waiting."""
        ready, _ = self._ray.wait([self._pending], timeout=0)
        if not ready:
            waited = time.monotonic() - self._began
            if not self._started and not self._wait and waited > ROOM_SECONDS:
                raise NoRoom(
                    f"its CPUs or devices were not free within {ROOM_SECONDS:g} seconds; wait for "
                    "them with `wait`"
                )
            return ()
        errors = self._ray.exceptions
        try:
            messages: Sequence[Message] = self._ray.get(self._pending)
        except errors.OutOfMemoryError as error:
            why = "Ray ended it because the node ran out of memory"
            raise NodeLost(why, out_of_memory=True) from error
        except errors.RayError as error:
            nodes = self._ray.nodes()
            if not any(each["Alive"] for each in nodes if each["NodeID"] == self._node):
                raise NodeLost("the node has left the cluster", gone=True) from error
            ended = isinstance(error, errors.RayActorError)
            raise NodeLost("its Ray worker has ended" if ended else _last_line(error)) from error
        self._started, self._pending = True, self._actor.messages.remote(_MESSAGE_SECONDS)
        return messages

    def stop(self) -> None:
        """End the actor; what it started ends with it."""
        with contextlib.suppress(Exception):  # Ray itself may be gone
            self._ray.kill(self._actor, no_restart=True)


class TuningActor:
    """A tuning on a node, in a thread, so that the driver can fetch its messages meanwhile.

    When the driver ends, Ray ends this process, and with it the tuning's worker processes.
    """

    def __init__(self, request: bytes) -> None:
        forget_ray_threads()
        self._messages: queue.Queue[Message] = queue.Queue()
        self._thread = threading.Thread(
            target=answer, args=(request, self._messages.put), daemon=True
        )

    def start(self) -> Sequence[Message]:
        """Begin; nothing is said yet."""
        self._thread.start()
        return ()

    def messages(self, seconds: float) -> Sequence[Message]:
        """Wait up to `seconds` for a message; return it and those that came with it."""
        try:
            messages = [self._messages.get(timeout=seconds)]
        except queue.Empty:
            return ()
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages


def forget_ray_threads() -> None:
    """Take back the number of threads that Ray has set; one set on the node itself is kept.

    A tuning measures what training will do, which starts outside of Ray.
    """
    if not _set_on_node():
        os.environ.pop(_THREADS_VARIABLE, None)


def _set_on_node() -> bool:
    """Return whether the variable comes from Ray's node process, whose child this one is."""
    try:
        inherited = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux
        return False
    return any(each.startswith(f"{_THREADS_VARIABLE}=".encode()) for each in inherited)
