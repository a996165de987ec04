"""Timing matrix products and a large copy on a device, in a child process of a framework.

A dtype that the hardware cannot run may end the process by a signal, so each result is a line on
the child's stdout as soon as it is known: results before a crash are kept, and the dtype that
crashed is reported as such. The child is
`python -m autoprec.backends.shared.matmul_timing FRAMEWORK DEVICE [DTYPE ...]`.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.family import Support
from autoprec.core.device.measurements import Measurements, Product, merge_repeated_products
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.placement import Placement, expose_only
from autoprec.core.dtypes import DType

#: A product that takes this long hides the cost of starting it.
MIN_PRODUCT_SECONDS = 0.05
#: No dtype is given more time than this: a float16 product on a CPU may be 400 times too slow.
DTYPE_BUDGET_SECONDS = 2.0
#: Products of a dtype that reach no more of float32's rate than this are slow, disturbed or not.
SURELY_SLOWER_RATIO = 0.5
#: Importing a framework and opening a device may take this long.
START_LIMIT_SECONDS = 90.0
#: One product of a badly emulated dtype, started just before its time was over.
SILENCE_LIMIT_SECONDS = 30.0

_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REPEATS = 4

#: Which frameworks can run which kind of device, the preferred one first.
_FRAMEWORKS_OF_KIND: Mapping[DeviceKind, tuple[str, ...]] = {
    DeviceKind.CPU: ("torch", "tensorflow"),
    DeviceKind.CUDA: ("torch", "tensorflow"),
    DeviceKind.ROCM: ("torch",),
    DeviceKind.XPU: ("torch",),
    DeviceKind.MPS: ("torch",),
    DeviceKind.TPU: (),
}
_MODULES = {
    "torch": "autoprec.backends.torch.measure.matmul_timing",
    "tensorflow": "autoprec.backends.keras.measure.matmul_timing",
}

#: NTSTATUS codes with which Windows ends a process where others send SIGILL and SIGSEGV.
_WINDOWS_CRASHES = {0xC000001D: "an illegal instruction", 0xC0000005: "an access violation"}


class Arithmetic(Protocol):
    """What a framework offers to be timed; sizes are of square matrices."""

    def prepare(self, dtype: DType, size: int) -> Any:
        """Make two `size` x `size` operands in `dtype`, on the device."""

    def multiply(self, operands: Any) -> None:
        """Multiply them, and wait until the product is there."""

    def prepare_copy(self, size_bytes: int) -> Any:
        """Make arrays whose copying reads and writes `size_bytes` bytes each way."""

    def copy(self, operands: Any) -> None:
        """Move the bytes, and wait until that is done."""


def measure(
    facts: DeviceFacts, frameworks: Sequence[str], dtypes: Sequence[DType] | None = None
) -> Measurements:
    """Time products per dtype with the first of the frameworks that can run such a device.

    Float32's, which all others are compared to, are timed again at the end. A dtype that seems
    slower by less than `SURELY_SLOWER_RATIO` is timed a second time, for others may use the device.
    """
    framework = timing_framework(facts.kind, frameworks)
    if framework is None:
        wanted = (
            " or ".join(_FRAMEWORKS_OF_KIND[facts.kind])
            or "a framework that autoprec can time it with"
        )
        return Measurements(notes=(f"not measured: {wanted} is not installed",))
    chosen = dtypes or [d for d in _TIMING_ORDER if facts.fact(d).support is not Support.ABSENT]
    again = [DType.FLOAT32] if DType.FLOAT32 in chosen[:-1] else []
    place = expose_only(facts.observation)
    first = measure_in_child(framework, place, [*chosen, *again])
    ratios = {dtype: merge_repeated_products(first).ratio(dtype) for dtype in chosen}
    unsure = [d for d, ratio in ratios.items() if ratio and SURELY_SLOWER_RATIO < ratio < 1.0]
    if not unsure:
        return merge_repeated_products(first)
    second = measure_in_child(framework, place, [*unsure, *again])
    return merge_repeated_products(replace(first, products=(*first.products, *second.products)))


def timing_framework(kind: DeviceKind, frameworks: Collection[str]) -> str | None:
    """Return which of the frameworks times products on such a device; None if none of them can."""
    return next((name for name in _FRAMEWORKS_OF_KIND[kind] if name in frameworks), None)


def timing_software(
    kind: DeviceKind, installed: Mapping[str, str], used: Collection[str]
) -> Mapping[str, str]:
    """Return the software whose timings of products count for a task that uses some of it.

    That is the task's own, where it can time products: another framework may have other kernels.
    `installed` maps names to versions.
    """
    own = {name: version for name, version in installed.items() if name in used}
    return own if timing_framework(kind, own) else installed


#: The slowest last, so that running out of time loses least.
_TIMING_ORDER = (DType.FLOAT32, DType.TF32, DType.BFLOAT16, DType.FLOAT16)


def measure_in_child(framework: str, place: Placement, dtypes: Sequence[DType]) -> Measurements:
    """Run the child and collect its messages; a crash or timeout ends it, results stay."""
    command = _command(framework, place.device, dtypes)
    settings = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # all of the GPU's memory is taken otherwise
        "PYTHONUNBUFFERED": "1",
    }
    environ = {**os.environ, **settings, **place.environment}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    )
    collected = _MessageCollector(framework)
    try:
        for message in _child_messages(child):
            collected.take(message)
    except TimeoutError as error:
        child.kill()
        child.wait()
        return collected.stopped(str(error), crashed=False)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()
    return collected.ended(child.returncode)


def _command(framework: str, device: str, dtypes: Sequence[DType]) -> list[str]:
    module = "autoprec.backends.shared.matmul_timing"
    return [sys.executable, "-P", "-m", module, framework, device, *(d.value for d in dtypes)]


def _child_messages(child: subprocess.Popen[str]) -> Iterator[Any]:
    """Yield the child's messages; raise TimeoutError when it falls silent."""
    waiting: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in child.stdout or ():
            waiting.put(line)
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    allowed = START_LIMIT_SECONDS
    while True:
        try:
            line = waiting.get(timeout=allowed)
        except queue.Empty:
            raise TimeoutError(f"no answer in {allowed:g} seconds") from None
        if line is None:
            child.wait()
            return
        allowed = SILENCE_LIMIT_SECONDS
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


class _MessageCollector:
    """Collects the child's messages, and knows which dtype it is measuring."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._products: list[Product] = []
        self._bandwidth: float | None = None
        self._current: DType | None = None
        self._notes: list[str] = []

    def take(self, message: Any) -> None:
        """Take one line: a dtype begun, a product measured, a bandwidth, or an error."""
        if not isinstance(message, dict):
            return
        try:
            if "begin" in message:
                self._current = DType(message["begin"])
            elif "product" in message:
                self._products.append(from_plain(Product, message["product"]))
                self._current = None
            elif "memory_bandwidth_gbps" in message:
                self._bandwidth = from_plain(float, message["memory_bandwidth_gbps"])
            elif "error" in message:
                self._notes.append(f"not measured: {message['error']}")
        except (DecodeError, ValueError) as error:
            self._notes.append(f"the measuring process wrote what cannot be read: {error}")

    def stopped(self, why: str, *, crashed: bool) -> Measurements:
        """Return the measurements of a child that was stopped or crashed."""
        if self._current is not None:
            self._products.append(Product(self._current, failure=why, crashed=crashed))
        else:
            self._notes.append(f"measuring stopped early: {why}")
        return self._result()

    def ended(self, code: int) -> Measurements:
        """Return the measurements by how the child ended: a signal during a dtype is a crash."""
        if code < 0:
            crashed = -code in (signal.SIGILL, signal.SIGSEGV, signal.SIGFPE)
            return self.stopped(f"the process ended by {_signal_name(-code)}", crashed=crashed)
        if code in _WINDOWS_CRASHES:
            return self.stopped(f"the process ended by {_WINDOWS_CRASHES[code]}", crashed=True)
        if code > 0:
            return self.stopped(f"the process ended with code {code}", crashed=False)
        return self._result()

    def _result(self) -> Measurements:
        return Measurements(
            framework=self._framework,
            products=tuple(self._products),
            memory_bandwidth_gbps=self._bandwidth,
            notes=tuple(self._notes),
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class ProductBudget:
    """How long to measure one dtype, and what a single product should take, in seconds."""

    product_seconds: float = MIN_PRODUCT_SECONDS
    dtype_seconds: float = DTYPE_BUDGET_SECONDS


def time_product(
    arithmetic: Arithmetic, dtype: DType, budget: ProductBudget | None = None
) -> Product:
    """Grow a product from small until one takes long enough; keep the rates of that size.

    The best counts; the slowest says how far timings can be trusted.
    """
    budget = budget or ProductBudget()
    end = time.perf_counter() + budget.dtype_seconds
    size, rates = 0, [0.0]
    try:
        for size in _SIZES:
            operands = arithmetic.prepare(dtype, size)
            arithmetic.multiply(operands)
            seconds = _seconds_of_product(arithmetic, operands)
            rates = [size**3 * 2 / seconds / 1e9]
            next_seconds = 8 * seconds
            if seconds >= budget.product_seconds or time.perf_counter() + 2 * next_seconds > end:
                break
        for _ in range(_REPEATS):
            if time.perf_counter() + seconds > end:
                break
            rates.append(size**3 * 2 / _seconds_of_product(arithmetic, operands) / 1e9)
    except Exception as error:
        if rates == [0.0]:
            return Product(dtype, failure=f"{type(error).__name__}: {_one_line(error)}")
    return Product(dtype, gflops=max(rates), size=size, slowest_gflops=min(rates))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _seconds_of_product(arithmetic: Arithmetic, operands: Any) -> float:
    start = time.perf_counter()
    arithmetic.multiply(operands)
    return max(time.perf_counter() - start, 1e-9)


def time_copy(arithmetic: Arithmetic, size_bytes: int = 2**28) -> float:
    """Return memory bandwidth in GB/s by a large copy, counting bytes read and written."""
    operands = arithmetic.prepare_copy(size_bytes)
    arithmetic.copy(operands)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        arithmetic.copy(operands)
        best = min(best, time.perf_counter() - start)
    return 2 * size_bytes / best / 1e9


def main(arguments: Sequence[str]) -> int:
    """Measure in this process, one JSON line a result: the child's side."""
    framework, device, *names = arguments
    try:
        arithmetic: Arithmetic = importlib.import_module(_MODULES[framework]).open_device(device)
    except Exception as error:
        _write_message({"error": f"{framework} cannot open {device}: {_one_line(error)}"})
        return 0
    for name in names:
        _write_message({"begin": name})
        _write_message({"product": to_plain(time_product(arithmetic, DType(name)))})
    try:
        _write_message({"memory_bandwidth_gbps": time_copy(arithmetic)})
    except Exception as error:
        _write_message({"error": f"memory bandwidth: {_one_line(error)}"})
    return 0


def _write_message(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
