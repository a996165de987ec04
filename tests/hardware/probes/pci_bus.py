"""A PCI bus as /sys shows it, for the tests of probes that read it."""

from benchmarks.recordings.machine_replay import synthetic_machine as machine

BUS = "/sys/bus/pci/devices"


def bus(*devices, **answers):
    files = {}
    for i, (vendor, device, kind) in enumerate(devices):
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            files[f"{BUS}/0000:00:{i:02x}.0/{name}"] = f"0x{value}\n"
    return machine(files=files, **answers)
