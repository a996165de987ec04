"""TPU chips are counted without asking any library."""

from autoprec.core.device.observation import DeviceKind
from autoprec.hardware.probes.pci import probe_tpu
from tests.hardware.probes.pci_bus import bus


def test_tpu_chips_are_counted_without_asking_any_library():
    chips = [("1ae0", "005e", "ff0000")] * 2
    assert len(probe_tpu(bus(*chips)).devices) == 2
    hidden = probe_tpu(bus(*chips, variables={"TPU_VISIBLE_CHIPS": ""}))
    assert (hidden.devices, hidden.unusable) == ((), ())
    assert "hides all 2" in hidden.notes[0]
    missed = probe_tpu(bus(*chips, variables={"TPU_VISIBLE_CHIPS": "9"}))
    assert (missed.devices, missed.notes) == ((), ())
    assert (missed.unusable[0].kind, "hides all 2" in missed.unusable[0].text) == (
        DeviceKind.TPU,
        True,
    )
