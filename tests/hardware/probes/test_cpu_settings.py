"""Settings of a CPU's libraries: what they withhold is not counted on, and each is told of."""

from dataclasses import replace

import pytest

from autoprec.core.device.family import Support
from autoprec.core.device.merging import merge
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import DType, Policy
from autoprec.hardware.catalogue import load_catalogue, profiles_folder
from autoprec.hardware.probes.cpu import probe_cpu
from benchmarks.recordings.machine_replay import RecordedMachine, read_recording

GRANITE = profiles_folder() / "recordings" / "intel-granite-rapids.json"
N, U = Support.NATIVE, Support.UNKNOWN


def looked_at(**variables):
    """A Granite Rapids (AVX512_BF16, AVX512_FP16, AMX, AMX-FP16; synthetic) with these set."""
    recording = replace(read_recording(GRANITE), variables=variables)
    (seen,) = probe_cpu(RecordedMachine(recording)).devices
    facts = merge(seen, load_catalogue().family_of(seen))
    assert facts.family == "intel-granite-rapids"
    return facts


@pytest.mark.parametrize(
    ("limit", "bfloat16", "float16"),
    [
        ("AVX2", U, U),
        ("avx2_vnni_2", U, U),
        ("AVX512_CORE_VNNI", U, U),
        ("AVX512_CORE_BF16", N, U),
        ("AVX512_CORE_FP16", N, U),
        ("AVX10_1_512", N, U),
        ("AVX10_2", N, U),
        ("AVX512_CORE_AMX", N, U),
        ("AVX10_1_512_AMX_FP16", N, N),
        ("AVX10_2_AMX_2", N, N),
        ("DEFAULT", N, N),
        ("ALL", N, N),
        ("AVX3", N, N),  # oneDNN ignores what it does not know
        ("", N, N),
    ],
)
@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_what_onednn_may_not_use_is_not_counted_on(name, limit, bfloat16, float16):
    facts = looked_at(**{name: limit})
    assert facts.fact(DType.BFLOAT16).support is bfloat16
    assert facts.fact(DType.FLOAT16).support is float16
    told = [note for note in facts.notes if note.startswith(f"{name}={limit} keeps oneDNN from ")]
    assert bool(told) == bool(facts.observation.unused)
    expected = Policy.MIXED_BFLOAT16 if bfloat16 is N else Policy.FLOAT32
    assert propose(facts).recommended is expected


def test_a_refusal_says_that_a_setting_is_the_reason():
    refusals = {
        r.candidate: r.reason for r in propose(looked_at(ONEDNN_MAX_CPU_ISA="AVX2")).refusals
    }
    assert "has amx_bf16, which a setting keeps libraries from using" in refusals["mixed_bfloat16"]


def test_tiles_that_a_limit_withholds_leave_avx512s_own():
    facts = looked_at(ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16")
    assert facts.observation.unused == {
        "amx_tile",
        "amx_int8",
        "amx_bf16",
        "amx_fp16",
        "avx512_fp16",
    }
    assert facts.fact(DType.BFLOAT16).reason.startswith("has avx512_bf16")


def test_the_newer_name_goes_before_the_older():
    assert looked_at(ONEDNN_MAX_CPU_ISA="ALL", DNNL_MAX_CPU_ISA="AVX2").observation.unused == set()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}, "compute float32 products in a lower precision"),
        ({"DNNL_DEFAULT_FPMATH_MODE": "any"}, "compute float32 products in a lower precision"),
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"}, ""),
        ({"TF_ENABLE_ONEDNN_OPTS": "0"}, "TensorFlow computes without oneDNN"),
        ({"TF_ENABLE_ONEDNN_OPTS": "1"}, ""),
        ({"ATEN_CPU_CAPABILITY": "default"}, "limits PyTorch's own kernels"),
        ({}, ""),
    ],
)
def test_settings_that_change_what_is_computed_are_told_of(variables, said):
    facts = looked_at(**variables)
    assert facts.fact(DType.BFLOAT16).support is N
    told = [note for note in facts.notes if any(name in note for name in variables)]
    assert (said in told[0]) if said else not told
