"""What must hold of measured products."""

from autoprec.core.device.measurements import Measurements, Product, merge_repeated_products
from autoprec.core.dtypes import DType
from tests.core.device.devices import BF16, measured


def test_of_two_measurements_the_faster_counts_and_a_great_difference_is_told():
    def both(first, second):
        rates = ((DType.FLOAT32, first), (BF16, 200.0), (DType.FLOAT32, second))
        products = tuple(Product(dtype, gflops=rate) for dtype, rate in rates)
        found = merge_repeated_products(Measurements("torch", products, notes=("one",)))
        assert [p.dtype for p in found.products] == [DType.FLOAT32, BF16]
        return found, found.product(DType.FLOAT32).gflops

    for first, second in ((100.0, 120.0), (120.0, 100.0)):
        found, rate = both(first, second)
        assert (rate, found.disturbed, found.notes) == (120.0, False, ("one",))
    for first, second in ((1.0, 120.0), (120.0, 1.0)):
        found, rate = both(first, second)
        assert (rate, found.disturbed) == (120.0, True)
        assert "float32 products ran at 1 and at 120 GFLOP/s within seconds" in found.notes[1]
    found, rate = both(100.0, None)
    assert (rate, found.disturbed) == (100.0, False)


def test_a_ratio_that_no_device_has_is_told_and_does_not_compare():
    for float32, disturbed in ((0.1, True), (3.2, False)):
        products = (Product(DType.FLOAT32, gflops=float32), Product(BF16, gflops=50.0))
        found = merge_repeated_products(Measurements("torch", products))
        assert found.disturbed is disturbed
        assert ("which no device does" in " ".join(found.notes)) is disturbed


def test_a_measurement_knows_its_products():
    found = measured(float32=1)
    assert found.product(DType.FLOAT32) is found.products[0]
    assert found.product(BF16) is None
