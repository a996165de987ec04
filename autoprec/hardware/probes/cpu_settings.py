"""Settings that keep libraries from using what a CPU can do, or change what they compute.

Sources: oneDNN developer guide, "CPU Dispatcher Control" (the names, their partial order and
aliases are those of `dnnl_set_max_cpu_isa`) and "Primitive Attributes: floating-point math mode";
oneDNN, src/common/utils.cpp (ONEDNN_ goes before DNNL_, case does not matter, other values are
ignored); PyTorch, aten/src/ATen/native/DispatchStub.cpp; TensorFlow, TF_ENABLE_ONEDNN_OPTS.
"""

from __future__ import annotations

from autoprec.hardware.machine import Machine

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


def unused_features(machine: Machine, features: frozenset[str]) -> frozenset[str]:
    """Return the features for 16-bit products that ONEDNN_MAX_CPU_ISA hides from oneDNN."""
    _, limit = _onednn(machine, "MAX_CPU_ISA")
    left = _USABLE_UNDER_LIMIT.get(limit.lower())
    return frozenset() if left is None else (features & _LIMITABLE) - left


def setting_notes(machine: Machine, unused: frozenset[str]) -> tuple[str, ...]:
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
