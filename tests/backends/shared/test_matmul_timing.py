"""What must hold of timing products: what came before a crash stays, and nothing hangs."""

import json
import sys
import types

import pytest

from autoprec.backends.shared import matmul_timing
from autoprec.backends.shared.matmul_timing import ProductBudget, time_product
from autoprec.core.device.facts import DeviceFacts, DTypeFact, Evidence
from autoprec.core.device.family import Support
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.merging import with_measurements
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.placement import Placement, expose_only
from autoprec.core.dtypes import DType

F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16


class Arithmetic:
    """Products that take no time, except where they fail."""

    def __init__(self, fails_from=None, copy_fails=False):
        self.sizes = []
        self._fails_from = fails_from
        self._copy_fails = copy_fails

    def prepare(self, dtype, size):
        if self._fails_from is not None and size >= self._fails_from:
            raise MemoryError("out of\nmemory")
        self.sizes.append(size)
        return size

    def multiply(self, operands):
        pass

    def prepare_copy(self, size_bytes):
        if self._copy_fails:
            raise MemoryError("too large")
        return size_bytes

    def copy(self, operands):
        pass


def test_a_product_grows_until_it_takes_long_enough():
    arithmetic = Arithmetic()
    found = time_product(arithmetic, F32, ProductBudget(product_seconds=60.0, dtype_seconds=60.0))
    assert arithmetic.sizes == list(matmul_timing._SIZES)
    assert (found.dtype, found.size) == (F32, matmul_timing._SIZES[-1])
    assert found.gflops > 0


def test_the_best_and_the_slowest_timing_of_the_last_size_are_kept(monkeypatch):
    seconds = iter([1e-3, 4e-3, 1e-3, 2e-3, 5e-3, 3e-3])
    monkeypatch.setattr(matmul_timing, "_seconds_of_product", lambda *_: next(seconds))
    budget = ProductBudget(product_seconds=3e-3, dtype_seconds=60.0)
    found = time_product(Arithmetic(), F32, budget)
    work = 2 * matmul_timing._SIZES[1] ** 3 / 1e9
    assert found.size == matmul_timing._SIZES[1]
    assert found.gflops == pytest.approx(work / 1e-3)
    assert found.slowest_gflops == pytest.approx(work / 5e-3)


def test_a_product_that_takes_long_enough_grows_no_more():
    arithmetic = Arithmetic()
    time_product(arithmetic, F32, ProductBudget(product_seconds=0.0))
    assert arithmetic.sizes == [matmul_timing._SIZES[0]]


def test_a_dtype_out_of_time_is_measured_by_what_it_did():
    arithmetic = Arithmetic()
    found = time_product(arithmetic, F32, ProductBudget(product_seconds=60.0, dtype_seconds=0.0))
    assert arithmetic.sizes == [matmul_timing._SIZES[0]]
    assert found.gflops


def test_a_size_that_fails_leaves_the_one_before():
    found = time_product(Arithmetic(fails_from=512), BF16, ProductBudget(60.0, 60.0))
    assert found.gflops
    assert not found.failure


def test_a_dtype_that_never_works_says_why_in_one_line():
    found = time_product(Arithmetic(fails_from=1), BF16)
    assert found == Product(BF16, failure="MemoryError: out of memory")


def test_a_copy_counts_bytes_read_and_written():
    assert matmul_timing.time_copy(Arithmetic(), 1000) > 0


def run_child(monkeypatch, capsys, arithmetic, *names):
    module = types.ModuleType("made_up_framework")
    module.open_device = arithmetic
    monkeypatch.setitem(sys.modules, "made_up_framework", module)
    monkeypatch.setitem(matmul_timing._MODULES, "torch", "made_up_framework")
    assert matmul_timing.main(["torch", "cpu", *names]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_child_says_what_it_begins_and_what_it_found(monkeypatch, capsys):
    said = run_child(monkeypatch, capsys, lambda device: Arithmetic(), "float32", "bfloat16")
    assert [next(iter(line)) for line in said] == [
        "begin",
        "product",
        "begin",
        "product",
        "memory_bandwidth_gbps",
    ]


def test_the_child_says_what_it_cannot_do(monkeypatch, capsys):
    def refuse(device):
        raise RuntimeError(f"no {device} here")

    said = run_child(monkeypatch, capsys, refuse, "float32")
    assert said == [{"error": "torch cannot open cpu: no cpu here"}]
    said = run_child(monkeypatch, capsys, lambda device: Arithmetic(copy_fails=True))
    assert said == [{"error": "memory bandwidth: too large"}]


def launch(monkeypatch, script, silent=5.0):
    monkeypatch.setattr(matmul_timing, "_command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(matmul_timing, "START_LIMIT_SECONDS", silent)
    return matmul_timing.measure_in_child("torch", Placement("cpu"), [F32, BF16])


SAY = "import json, os, signal, sys, time\ndef say(**m): print(json.dumps(m), flush=True)\n"
FIRST = SAY + "say(begin='float32'); say(product={'dtype': 'float32', 'gflops': 9.0})\n"


def test_a_child_that_ends_well_gives_what_it_said(monkeypatch):
    script = FIRST + "print('noise'); print('[1]'); say(memory_bandwidth_gbps=12.5)"
    found = launch(monkeypatch, script)
    assert found == Measurements("torch", (Product(F32, gflops=9.0),), 12.5)


@pytest.mark.skipif(sys.platform == "win32", reason="signals end processes on POSIX")
@pytest.mark.parametrize(
    ("name", "crashed"), [("SIGILL", True), ("SIGSEGV", True), ("SIGKILL", False)]
)
def test_a_signal_in_a_dtype_keeps_what_came_before(monkeypatch, name, crashed):
    script = FIRST + f"say(begin='bfloat16'); os.kill(os.getpid(), signal.{name})"
    found = launch(monkeypatch, script)
    assert found.product(F32).gflops == 9.0
    assert found.product(BF16) == Product(
        BF16, failure=f"the process ended by {name}", crashed=crashed
    )


def test_a_crash_between_dtypes_is_a_note(monkeypatch):
    found = launch(monkeypatch, FIRST + "sys.exit(3)")
    assert found.products == (Product(F32, gflops=9.0),)
    assert found.notes == ("measuring stopped early: the process ended with code 3",)


def test_a_child_that_falls_silent_is_ended(monkeypatch):
    monkeypatch.setattr(matmul_timing, "SILENCE_LIMIT_SECONDS", 0.5)
    script = FIRST + "say(begin='bfloat16'); time.sleep(60)"
    found = launch(monkeypatch, script)
    assert found.product(BF16).failure == "no answer in 0.5 seconds"
    assert not found.product(BF16).crashed


def test_what_cannot_be_read_is_a_note(monkeypatch):
    script = SAY + "say(product={'dtype': 'int4'}); say(begin='x'); say(error='none'); say(other=1)"
    found = launch(monkeypatch, script)
    assert found.products == ()
    assert "cannot be read" in found.notes[0]
    assert found.notes[2] == "not measured: none"


def test_a_windows_crash_is_one_too():
    collected = matmul_timing._MessageCollector("torch")
    collected.take({"begin": "bfloat16"})
    found = collected.ended(0xC000001D)
    assert found.product(BF16).crashed


def test_signals_without_a_name_are_numbers():
    assert matmul_timing._signal_name(999) == "signal 999"


def facts(kind=DeviceKind.CPU, index=0):
    known = {F32: DTypeFact(Support.NATIVE), F16: DTypeFact(Support.ABSENT)}
    return DeviceFacts(Observation(kind, index=index), "f", "t", known)


def test_without_a_framework_that_can_the_facts_say_so():
    found = matmul_timing.measure(facts(), ["jax"])
    assert found.notes == ("not measured: torch or tensorflow is not installed",)
    found = matmul_timing.measure(facts(DeviceKind.TPU), ["torch"])
    assert "not measured" in found.notes[0]


@pytest.mark.parametrize(
    "kind", [DeviceKind.CPU, DeviceKind.MPS, DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.XPU]
)
def test_a_device_is_measured_where_a_trial_would_be(monkeypatch, kind):
    asked = []

    def launched(framework, place, dtypes):
        asked.append((framework, place, tuple(dtypes)))
        return Measurements(framework, (Product(F32, gflops=10.0), Product(BF16, gflops=1.0)))

    monkeypatch.setattr(matmul_timing, "measure_in_child", launched)
    known = facts(kind, index=1)
    found = matmul_timing.measure(known, ["tensorflow", "torch"])
    assert asked == [("torch", expose_only(known.observation), (F32, DType.TF32, BF16, F32))]
    fact = with_measurements(known, found).fact(BF16)
    assert (fact.support, fact.evidence) == (Support.EMULATED, Evidence.MEASURED)


def test_a_dtype_that_seems_a_little_slower_is_timed_a_second_time(monkeypatch):
    """Another process slowed its products alone, between both of float32's."""
    answers, asked = iter([(70.0, 1.0), (130.0, 1.0)]), []

    def launched(framework, place, dtypes):
        asked.append(tuple(dtypes))
        bfloat16, float16 = next(answers)
        rates = {F32: 100.0, BF16: bfloat16, F16: float16}
        return Measurements(framework, tuple(Product(d, gflops=rates[d]) for d in dtypes))

    monkeypatch.setattr(matmul_timing, "measure_in_child", launched)
    here = DeviceFacts(Observation(DeviceKind.CPU), "f", "t", {})
    found = matmul_timing.measure(here, ["torch"], (F32, BF16, F16))
    assert asked == [(F32, BF16, F16, F32), (BF16, F32)]
    assert found.ratio(BF16) == 1.3
    assert found.disturbed


def test_the_child_is_shown_that_device_alone(monkeypatch):
    script = SAY + "say(error=os.environ['CUDA_VISIBLE_DEVICES'])"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(matmul_timing, "_command", lambda *_: [sys.executable, "-c", script])
    one = DeviceFacts(Observation(DeviceKind.CUDA, index=1, uuid="GPU-2"), "f", "t", {})
    assert matmul_timing.measure(one, ["torch"]).notes == ("not measured: GPU-2",)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_installed_framework_really_multiplies(framework):
    found = matmul_timing.measure_in_child(framework, Placement("cpu"), [F32, DType.FLOAT8])
    assert found.product(F32).gflops > 0.01
    assert "not measured with" in found.product(DType.FLOAT8).failure
    assert found.memory_bandwidth_gbps > 0.01
    assert found.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_device_that_is_not_there_is_a_note(framework):
    found = matmul_timing.measure_in_child(framework, Placement("cuda:99"), [F32])
    assert found.products == ()
    assert f"{framework} cannot open cuda:99" in found.notes[0]
