"""Devices made by hand, for the tests of what is known of them."""

from __future__ import annotations

from hypothesis import strategies as st

from autoprec.core.device.family import DTypeRow, Family, Support
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType

BF16 = DType.BFLOAT16
NATIVE = DTypeRow(Support.NATIVE, alignment=8, best_alignment=64, peak_dense_tflops=300.0)
WANTS_FLAG = DTypeRow(Support.NATIVE, requires=("fast_a", "fast_b"), alignment=2)


def family(row=NATIVE, kind=DeviceKind.CPU, **more):
    return Family("some-family", kind, "Some device", ("a source",), dtypes={BF16: row}, **more)


def seen(kind=DeviceKind.CPU, **more):
    return Observation(kind, **more)


def measured(**gflops):
    products = tuple(Product(DType(name), gflops=value, size=512) for name, value in gflops.items())
    return Measurements("torch", products)


rows = st.builds(
    DTypeRow,
    support=st.sampled_from(Support),
    requires=st.lists(st.sampled_from(["a", "b"]), unique=True).map(tuple),
    otherwise=st.sampled_from(Support),
    alignment=st.integers(1, 64),
    peak_dense_tflops=st.none() | st.floats(0.1, 1000),
)


features = st.frozensets(st.sampled_from(["a", "b", "c"]))
