"""What must hold of device facts: what names and identifies a device."""

import pytest

from autoprec.core.codec import to_plain
from autoprec.core.device.facts import GIB
from autoprec.core.device.merging import (
    merge,
)
from autoprec.core.device.observation import DeviceKind
from tests.core.device.devices import family, seen


def test_the_fingerprint_has_no_serial_number():
    observation = seen(
        name="A GPU", uuid="GPU-secret", memory_bytes=int(15.7 * GIB), core_quota=0.5, driver="1"
    )
    fingerprint = merge(observation, family()).fingerprint
    assert to_plain(fingerprint) == {
        "kind": "cpu",
        "family": "some-family",
        "name": "A GPU",
        "memory_gib": 16,
        "core_quota": 0.5,
        "rehearsal": False,
        "partition": "",
    }


def test_a_nameless_device_is_called_by_its_family_and_without_memory_has_none():
    facts = merge(seen(), family())
    assert facts.name == "Some device"
    assert facts.fingerprint.memory_gib == 0


@pytest.mark.parametrize(
    ("kind", "address"),
    [(DeviceKind.CPU, "cpu"), (DeviceKind.MPS, "mps"), (DeviceKind.CUDA, "cuda:2")],
)
def test_the_address_is_what_a_user_types(kind, address):
    assert merge(seen(kind, index=2), family(kind=kind)).address == address
