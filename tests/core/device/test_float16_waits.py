"""On which devices float16 waits for bfloat16, and where that is said."""

import pytest
from factories import device_of_family

from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import float16_waits, propose
from tests.core.device.test_policies import F16, F32, A, E, N, U, fact, facts

WAITS = "not known to be faster than mixed_bfloat16: tried only where that fails or is slower than"


@pytest.mark.parametrize(
    ("bfloat16", "float16", "waits"),
    [
        (fact(N), fact(N), True),
        (fact(N, peak=312.0), fact(N, peak=312.0), True),
        (fact(N, gflops=766.0), fact(N, gflops=734.0), True),
        (fact(N, gflops=700.0), fact(N, gflops=764.0), True),  # no more than timings differ by
        (fact(N, gflops=700.0), fact(N, gflops=780.0), False),
        (fact(N, peak=92.3), fact(N, peak=184.6), False),
        (fact(N, gflops=96.0), fact(N, gflops=97.0), False),  # slower than float32 by a little
        (fact(E), fact(N), False),
        (fact(A), fact(N), False),
        (fact(U), fact(N), False),
        (fact(N), fact(E), False),
    ],
)
def test_float16_waits_where_bfloat16_is_native_and_as_fast(bfloat16, float16, waits):
    known = facts(float32=fact(N, peak=60.0, gflops=100.0), bfloat16=bfloat16, float16=float16)
    reasons = {c.policy: " ".join(c.reasons) for c in propose(known).candidates}
    assert float16_waits(known) == waits == (WAITS in reasons.get(F16, ""))
    asked = propose(known, (F16, F32)).candidates
    assert not any(WAITS in reason for each in asked for reason in each.reasons)


@pytest.mark.parametrize(
    ("family", "waits"),
    [
        ("nvidia-h100-sxm", True),
        ("nvidia-ampere", True),
        ("nvidia-ada", True),
        ("amd-mi300x", True),
        ("intel-arc-a770", True),
        ("nvidia-volta", False),
        ("nvidia-t4", False),
        ("nvidia-p100", False),
    ],
)
def test_float16_waits_on_gpus_that_have_fast_bfloat16(family, waits):
    assert float16_waits(device_of_family(family)) == waits


def test_float16_waits_on_a_cpu_where_both_were_measured_to_be_fast():
    timed = {"float32": fact(N, gflops=100.0), "bfloat16": fact(N, gflops=250.0)}
    assert float16_waits(facts(DeviceKind.CPU, float16=fact(N, gflops=240.0), **timed))
    assert not float16_waits(facts(DeviceKind.CPU, float16=fact(N), **timed))
