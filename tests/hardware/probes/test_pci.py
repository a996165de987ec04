"""A list of visible devices never invents or repeats one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.hardware.probes.pci import visible_ordinals


@settings(deadline=None)
@given(st.integers(0, 8), st.none() | st.text(alphabet="0123456789,-+ gx", max_size=12))
def test_a_visibility_list_never_invents_or_repeats_a_device(count, text):
    shown = visible_ordinals(count, text)
    assert len(set(shown)) == len(shown)
    assert all(0 <= ordinal < count for ordinal in shown)
