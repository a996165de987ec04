"""The CPU: from /proc/cpuinfo, from sysctl on macOS, from py-cpuinfo if both are absent.

Settings may keep libraries from using what it can do, or change what they compute. Their sources:
oneDNN developer guide, "CPU Dispatcher Control" (the names, their partial order and aliases are
those of `dnnl_set_max_cpu_isa`) and "Primitive Attributes: floating-point math mode"; oneDNN,
src/common/utils.cpp (ONEDNN_ goes before DNNL_, case does not matter, other values are ignored);
PyTorch, aten/src/ATen/native/DispatchStub.cpp; TensorFlow, TF_ENABLE_ONEDNN_OPTS.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.hardware.control_groups import Limits, read_limits
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.apple import apple_cpu

_TILE_PREFIX = "amx"


def probe_cpu(machine: Machine) -> Findings:
    """Observe the CPU; there always is one, however little can be read about it."""
    limits = read_limits(machine)
    notes = _limit_notes(limits)
    seen = apple_cpu(machine) if machine.system == "Darwin" else None
    if seen is None:
        seen = _from_proc(machine) or _from_cpuid(machine)
    if not seen.features:
        notes = (*notes, "the CPU's features could not be read")
    features, denied = _split_tiles(machine, seen.features)
    unused = _unused_features(machine, features)
    usable = machine.usable_processors() or machine.processors()
    observation = Observation(
        kind=DeviceKind.CPU,
        name=seen.name,
        vendor=seen.vendor,
        architecture=machine.architecture.lower(),
        cpu_family=seen.cpu_family,
        cpu_model=seen.cpu_model,
        implementer=seen.implementer,
        part=seen.part,
        board=_board(machine),
        features=features,
        denied=denied,
        unused=unused,
        partial_features=seen.partial_features,
        memory_bytes=limits.memory_bytes,
        cores=seen.cores or machine.processors(),
        usable_cores=usable,
        core_quota=limits.core_quota,
        notes=(*notes, *_setting_notes(machine, unused)),
    )
    return Findings((observation,))


def _limit_notes(limits: Limits) -> tuple[str, ...]:
    notes = []
    if limits.memory_bytes is None:
        notes.append("the size of the memory could not be read")
    elif limits.memory_limited:
        notes.append(f"a control group limits memory to {limits.memory_bytes / 2**30:.1f} GiB")
    if limits.core_quota is not None:
        notes.append(f"a control group limits CPU time to {limits.core_quota:g} cores")
    return tuple(notes)


def _split_tiles(
    machine: Machine, features: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Separate AMX if the kernel denies this process its tiles: a flag alone proves nothing."""
    tiles = frozenset(name for name in features if name.startswith(_TILE_PREFIX))
    if tiles and machine.tiles_permitted() is False:
        return features - tiles, tiles
    return features, frozenset()


def _from_proc(machine: Machine) -> Observation | None:
    blocks = [
        block
        for text in (machine.read("/proc/cpuinfo") or "").split("\n\n")
        if "processor" in (block := _fields(text))
    ]
    if not blocks:
        return None
    first = blocks[0]
    flags = [_flags(block) for block in blocks]
    cores = {(b.get("physical id"), b.get("core id", str(i))) for i, b in enumerate(blocks)}
    return Observation(
        kind=DeviceKind.CPU,
        name=" ".join(first.get("model name", "").split()),
        vendor=first.get("vendor_id", ""),
        cpu_family=_integer(first.get("cpu family")),
        cpu_model=_integer(first.get("model")),
        implementer=first.get("cpu implementer", ""),
        part=first.get("cpu part", ""),
        features=frozenset.intersection(*flags),
        cores=len(cores),
    )


def _fields(text: str) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip().lower(): value.strip() for key, colon, value in pairs if colon}


def _flags(block: Mapping[str, str]) -> frozenset[str]:
    return frozenset((block.get("flags") or block.get("features") or "").lower().split())


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


def _from_cpuid(machine: Machine) -> Observation:
    """Observe the CPU through py-cpuinfo, whose table knows neither AMX nor AVX512_BF16."""
    info = machine.cpuid()
    flags = info.get("flags")
    family, model = info.get("family"), info.get("model")
    return Observation(
        kind=DeviceKind.CPU,
        name=str(info.get("brand_raw", "")),
        vendor=str(info.get("vendor_id_raw", "")),
        cpu_family=family if isinstance(family, int) else None,
        cpu_model=model if isinstance(model, int) else None,
        features=frozenset(map(str, flags)) if isinstance(flags, list | tuple) else frozenset(),
        partial_features=True,
    )


def _board(machine: Machine) -> str:
    """Return the machine's maker and model, without any serial number."""
    names = ("sys_vendor", "product_name")
    parts = (machine.read(f"/sys/class/dmi/id/{name}") or "" for name in names)
    return " ".join(" ".join(parts).split())


# Settings ---------------------------------------------------------------------------------------

_BF16, _FP16 = "avx512_bf16", "avx512_fp16"
_TILES = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
_TILES_FP16 = frozenset({"amx_fp16"})
_AVX10 = frozenset({_BF16, _FP16})

#: The instructions for 16-bit products that remain under each limit.
_USABLE_UNDER_LIMIT: dict[str, frozenset[str]] = {
    **dict.fromkeys(("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"), frozenset()),
    **dict.fromkeys(("avx512_core", "avx512_core_vnni"), frozenset()),
    "avx512_core_bf16": frozenset({_BF16}),
    **dict.fromkeys(("avx512_core_fp16", "avx10_1_512"), _AVX10),
    **dict.fromkeys(("avx10_2", "avx10_2_512", "avx10_2_ace"), _AVX10),
    **dict.fromkeys(("avx512_core_amx", "avx10_1_512_amx"), _AVX10 | _TILES),
    **dict.fromkeys(
        ("avx512_core_amx_fp16", "avx10_1_512_amx_fp16"), _AVX10 | _TILES | _TILES_FP16
    ),
    **dict.fromkeys(("avx10_2_amx_2", "avx10_2_512_amx_2"), _AVX10 | _TILES | _TILES_FP16),
}
_LIMITABLE = _AVX10 | _TILES | _TILES_FP16


def _unused_features(machine: Machine, features: frozenset[str]) -> frozenset[str]:
    """Return the features for 16-bit products that ONEDNN_MAX_CPU_ISA hides from oneDNN."""
    _, limit = _onednn(machine, "MAX_CPU_ISA")
    left = _USABLE_UNDER_LIMIT.get(limit.lower())
    return frozenset() if left is None else (features & _LIMITABLE) - left


def _setting_notes(machine: Machine, unused: frozenset[str]) -> tuple[str, ...]:
    """Return a note on each setting that matters, with its consequence."""
    notes = []
    name, limit = _onednn(machine, "MAX_CPU_ISA")
    if unused:
        notes.append(f"{name}={limit} keeps oneDNN from using {', '.join(sorted(unused))}")
    name, mode = _onednn(machine, "DEFAULT_FPMATH_MODE")
    if mode and mode.lower() != "strict":
        notes.append(f"{name}={mode}: oneDNN may compute float32 products in a lower precision")
    if (machine.variable("TF_ENABLE_ONEDNN_OPTS") or "").lower() in ("0", "false"):
        notes.append(
            "TF_ENABLE_ONEDNN_OPTS is off: TensorFlow computes without oneDNN, and what is shown "
            "for 16-bit dtypes does not apply to it"
        )
    capability = machine.variable("ATEN_CPU_CAPABILITY")
    if capability:
        notes.append(
            f"ATEN_CPU_CAPABILITY={capability} limits PyTorch's own kernels, but not oneDNN's"
        )
    return tuple(notes)


def _onednn(machine: Machine, name: str) -> tuple[str, str]:
    """Return the variable that oneDNN reads, under its newer or older name, and its value."""
    for full in (f"ONEDNN_{name}", f"DNNL_{name}"):
        value = machine.variable(full)
        if value:
            return full, value[:80]
    return "", ""
