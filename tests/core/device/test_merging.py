"""What must hold of merged facts: measured beats probed beats catalogue."""

from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.core.codec import from_plain, to_plain
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.merging import merge, with_measurements
from autoprec.core.dtypes import DType
from tests.core.device.devices import BF16, family, features, rows, seen


def test_a_part_of_a_device_has_not_the_whole_ones_peaks():
    facts = merge(seen(partition="1g.5gb"), family(memory_bandwidth_gbps=1555.0))
    assert facts.fact(BF16).peak_dense_tflops is None
    assert facts.memory_bandwidth_gbps is None
    assert "a part of the device" in facts.notes[-1]


def test_notes_of_the_probe_and_of_the_family_are_kept():
    facts = merge(seen(notes=("probed",)), family(note="known"))
    assert facts.notes == ("probed", "known")


def test_timings_that_other_processes_disturbed_are_known_as_such():
    facts = merge(seen(), family())
    for disturbed in (False, True):
        timed = with_measurements(facts, Measurements("torch", disturbed=disturbed))
        assert timed.disturbed is disturbed


products = st.builds(
    Product,
    dtype=st.sampled_from(DType),
    gflops=st.none() | st.floats(0, 1e6),
    crashed=st.booleans(),
)


@settings(deadline=None)
@given(row=rows, features=features, denied=features, products=st.lists(products).map(tuple))
def test_any_facts_survive_being_written_and_read(row, features, denied, products):
    observation = seen(features=features, denied=denied)
    facts = with_measurements(merge(observation, family(row)), Measurements("torch", products))
    assert from_plain(DeviceFacts, to_plain(facts)) == facts
