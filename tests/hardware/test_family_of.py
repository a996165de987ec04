"""Which family an observed device belongs to, by name, number and PCI id."""

from dataclasses import replace

import pytest

from autoprec.core.device.family import Match, Support
from autoprec.core.device.merging import merge
from autoprec.core.device.observation import UNIFIED_MEMORY_NOTE, DeviceKind, Observation
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import DType, Policy
from autoprec.hardware.catalogue import load_catalogue

CATALOGUE = load_catalogue()


@pytest.mark.parametrize(
    ("name", "capability", "family"),
    [
        ("NVIDIA H200", "9.0", "nvidia-h200"),
        ("NVIDIA H200 NVL", "9.0", "nvidia-h200-nvl"),
        ("NVIDIA H20", "9.0", "nvidia-h20"),
        ("NVIDIA H100 NVL", "9.0", "nvidia-h100-nvl"),
        ("NVIDIA L4", "8.9", "nvidia-l4"),
        ("NVIDIA L40", "8.9", "nvidia-l40"),
        ("NVIDIA L40S", "8.9", "nvidia-l40s"),
        ("Tesla T4", "7.5", "nvidia-t4"),
        ("NVIDIA T400", "7.5", "nvidia-turing-gtx16"),
        ("NVIDIA A10", "8.6", "nvidia-a10"),
        ("NVIDIA A10G", "8.6", "nvidia-a10g"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "nvidia-a100-sxm4-80gb"),
        ("NVIDIA A40", "8.6", "nvidia-a40"),
        ("NVIDIA RTX A4000", "8.6", "nvidia-ampere"),
        ("NVIDIA GeForce RTX 4090", "8.9", "nvidia-rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "8.9", "nvidia-geforce-40"),
        ("NVIDIA GeForce RTX 4080 SUPER", "8.9", "nvidia-geforce-40"),
        ("Tesla V100S-PCIE-32GB", "7.0", "nvidia-v100s-pcie"),
        ("Xavier", "7.2", "nvidia-jetson-xavier"),
        ("NVIDIA GeForce GTX 1080 Ti", "6.1", "nvidia-geforce-10"),
        ("NVIDIA TITAN V", "7.0", "nvidia-titan-v"),
        ("NVIDIA GeForce RTX 2080", "7.5", "nvidia-geforce-20"),
        ("NVIDIA GeForce RTX 2080 Ti", "7.5", "nvidia-rtx-2080-ti"),
        ("Quadro RTX 2000", "7.5", "nvidia-turing"),
        ("Orin", "8.7", "nvidia-jetson-orin"),
        ("GRID T4-16Q", "7.5", "nvidia-t4"),
        ("NVIDIA Thor", "11.0", "nvidia-jetson-thor"),
        ("Tesla K80", "3.7", "nvidia-kepler-maxwell"),
        ("", "8.0", "nvidia-ampere"),
        ("NVIDIA Something", "", "generic-cuda"),
        ("NVIDIA Something", "unknown", "generic-cuda"),
        ("NVIDIA VR200", "10.7", "nvidia-rubin"),
        ("NVIDIA Something", "8.8", "nvidia-newer"),
        ("NVIDIA Something", "13.0", "nvidia-newer"),
        ("Quadro T2000", "7.5", "nvidia-turing-gtx16"),
        ("Quadro RTX 4000", "7.5", "nvidia-turing"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "12.0",
            "nvidia-rtx-pro-6000-blackwell-server",
        ),
        (
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "12.0",
            "nvidia-rtx-pro-6000-blackwell",
        ),
    ],
)
def test_gpus_are_told_apart_by_whole_words(name, capability, family):
    seen = Observation(DeviceKind.CUDA, name=name, compute_capability=capability)
    assert CATALOGUE.family_of(seen).name == family


@pytest.mark.parametrize(
    ("cpu_family", "model", "family"),
    [
        (23, 1, "amd-zen"),
        (23, 49, "amd-zen2"),
        (23, 113, "amd-zen2"),
        (25, 1, "amd-zen3"),
        (25, 33, "amd-zen3"),
        (25, 17, "amd-zen4"),
        (25, 97, "amd-zen4"),
        (25, 160, "amd-zen4"),
        (26, 2, "amd-zen5"),
        (26, 0x4F, "amd-zen5"),
        (26, 0x50, "amd-zen6"),
        (26, 0x60, "amd-zen5"),
        (26, 0x80, "amd-zen6"),
        (26, 0xAF, "amd-zen6"),
        (26, 0xC0, "amd-zen6"),
        (26, 0xD0, "amd-zen6"),
        (26, 0xEF, "amd-zen6"),
        (26, 0xF0, "amd-family-26"),
        (99, 2, "generic-x86"),
        (None, None, "generic-x86"),
    ],
)
def test_amd_cpus_are_told_apart_by_family_and_model(cpu_family, model, family):
    seen = Observation(
        DeviceKind.CPU,
        vendor="AuthenticAMD",
        architecture="x86_64",
        cpu_family=cpu_family,
        cpu_model=model,
    )
    assert CATALOGUE.family_of(seen).name == family


@pytest.mark.parametrize(
    ("cpu_family", "model", "features", "family", "bfloat16"),
    [
        (19, 1, {"amx_bf16", "avx512_bf16"}, "intel-diamond-rapids", Support.NATIVE),
        (18, 1, {"avx512_bf16"}, "intel-nova-lake", Support.NATIVE),
        (18, 3, {"avx2"}, "intel-nova-lake", Support.EMULATED),
        (6, 0xDD, {"avx2"}, "intel-clearwater-forest", Support.EMULATED),
        (6, 0xCC, {"avx2"}, "intel-panther-lake", Support.EMULATED),
        (6, 0xD5, {"avx2"}, "intel-panther-lake", Support.EMULATED),
        (6, 0xAF, {"avx2"}, "intel-sierra-forest", Support.EMULATED),
        (6, 0xD7, {"avx2"}, "intel-client", Support.EMULATED),
    ],
)
def test_intel_cpus_are_told_apart_by_family_and_model(
    cpu_family, model, features, family, bfloat16
):
    seen = Observation(
        DeviceKind.CPU,
        vendor="GenuineIntel",
        architecture="x86_64",
        cpu_family=cpu_family,
        cpu_model=model,
        features=frozenset(features),
    )
    found = CATALOGUE.family_of(seen)
    assert found.name == family
    assert merge(seen, found).fact(DType.BFLOAT16).support is bfloat16


@pytest.mark.parametrize(
    ("architecture", "family", "float16"),
    [
        ("gfx900", "amd-vega", Support.EMULATED),
        ("gfx906", "amd-vega20", Support.NATIVE),
        ("gfx1010", "amd-rdna1", Support.EMULATED),
        ("gfx1012", "amd-rdna1-dot", Support.NATIVE),
        ("gfx1030", "amd-rdna2", Support.NATIVE),
        ("gfx1250", "amd-mi455x", Support.NATIVE),
        ("gfx1251", "amd-mi430x", Support.NATIVE),
    ],
)
def test_float16_is_native_where_it_accumulates_in_float32(architecture, family, float16):
    found = CATALOGUE.family_of(Observation(DeviceKind.ROCM, architecture=architecture))
    assert found.name == family
    assert found.dtypes[DType.FLOAT16].support is float16


@pytest.mark.parametrize(
    ("kind", "pci", "family"),
    [
        (DeviceKind.ROCM, "1002:74a1", "amd-mi300x"),
        (DeviceKind.ROCM, "1002:74a2", "amd-mi308x"),
        (DeviceKind.ROCM, "1002:74a9", "amd-mi300x-hf"),
        (DeviceKind.ROCM, "1002:74b9", "amd-mi325x"),
        (DeviceKind.XPU, "8086:b080", "intel-xe3-lpg"),
        (DeviceKind.XPU, "8086:fd81", "intel-xe3-lpg"),
        (DeviceKind.TPU, "1ae0:0076", "tpu-v7x"),
    ],
)
def test_pci_ids_tell_products_apart(kind, pci, family):
    architecture = "gfx942" if kind is DeviceKind.ROCM else ""
    seen = Observation(kind, pci=pci, architecture=architecture)
    assert CATALOGUE.family_of(seen).name == family


@pytest.mark.parametrize(
    ("name", "gpu", "cpu"),
    [
        ("Apple M1", "apple-m1", "apple-m1-cpu"),
        ("Apple M2 Pro", "apple-m2-pro", "apple-m2-cpu"),
        ("Apple M5", "apple-m5", "apple-m5-cpu"),
        ("Apple M5 Max", "apple-m5-max", "apple-m5-cpu"),
    ],
)
def test_a_mac_is_known_by_its_chip_and_its_cpu_is_left_in_float32(name, gpu, cpu):
    assert CATALOGUE.family_of(Observation(DeviceKind.MPS, name=name)).name == gpu
    seen = Observation(
        DeviceKind.CPU,
        name=name,
        architecture="arm64",
        implementer="0x61",
        features=frozenset({"bf16", "fp16"}),
    )
    family = CATALOGUE.family_of(seen)
    assert family.name == cpu
    facts = merge(seen, family)
    assert facts.fact(DType.BFLOAT16).support is Support.UNKNOWN
    assert propose(facts).policies == (Policy.FLOAT32,)


@pytest.mark.parametrize(
    ("implementer", "part", "board", "family"),
    [
        ("0x41", "0xd84", "Amazon EC2", "arm-graviton5"),
        ("0x41", "0xd84", "", "arm-neoverse-v3"),
        ("0x4e", "0x010", "", "nvidia-vera"),
    ],
)
def test_arm_cpus_are_told_apart_by_implementer_and_part(implementer, part, board, family):
    seen = Observation(
        DeviceKind.CPU,
        architecture="aarch64",
        implementer=implementer,
        part=part,
        board=board,
        features=frozenset({"asimdhp", "bf16"}),
    )
    found = CATALOGUE.family_of(seen)
    assert found.name == family
    assert merge(seen, found).fact(DType.BFLOAT16).support is Support.NATIVE


def test_what_a_newer_nvidia_gpu_has_is_assumed_and_says_so():
    seen = Observation(DeviceKind.CUDA, name="NVIDIA Next", compute_capability="14.0")
    facts = merge(seen, CATALOGUE.family_of(seen))
    for dtype in (DType.TF32, DType.BFLOAT16, DType.FLOAT16):
        assert facts.fact(dtype).support is Support.NATIVE
        assert "assumed" in facts.fact(dtype).reason
    assert propose(facts).recommended is Policy.MIXED_BFLOAT16


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("Orin", "8.7"),
        ("Xavier", "7.2"),
        ("NVIDIA Thor", "11.0"),
        ("NVIDIA GB10", "12.1"),
        ("NVIDIA N1X", "12.1"),
    ],
)
def test_what_a_driver_says_of_a_shared_memory_is_not_the_gpus_own(name, capability):
    """Synthetic: an NVML that names a size, as newer ones may."""
    seen = Observation(DeviceKind.CUDA, name=name, compute_capability=capability, memory_bytes=8)
    facts = merge(seen, CATALOGUE.family_of(seen))
    assert facts.observation.memory_bytes is None
    assert sum("shares the CPU's memory" in note for note in facts.notes) == 1
    assert (
        merge(replace(seen, notes=(UNIFIED_MEMORY_NOTE,)), CATALOGUE.family_of(seen)).notes
        == facts.notes
    )


@pytest.mark.parametrize("text", ["8", "8.x", "-8.0", "8.0-9.0", ""])
def test_a_capability_is_a_version_or_one_and_all_newer(text):
    with pytest.raises(ValueError, match="expected a capability like"):
        Match(compute_capability=(text,))
