"""What must hold of the probe's table: it says what the values say, and cannot be steered."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from autoprec.core.device.family import DTypeRow, Family, Support
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.merging import merge, with_measurements
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.policies import propose
from autoprec.core.device.probe_result import DeviceReport, FrameworkFact, ProbeResult
from autoprec.core.dtypes import DType
from autoprec.reporting.probe import print_probe
from autoprec.reporting.text import printable

ROWS = {
    DType.FLOAT32: DTypeRow(Support.NATIVE, peak_dense_tflops=19.5),
    DType.BFLOAT16: DTypeRow(
        Support.NATIVE, alignment=8, best_alignment=64, peak_dense_tflops=1312.0
    ),
    DType.FLOAT16: DTypeRow(Support.EMULATED, reason="because of [bold]this[/bold]", alignment=8),
    DType.TF32: DTypeRow(Support.NATIVE, alignment=4),
    DType.FLOAT8: DTypeRow(Support.ABSENT),
}


def printed(result, width=160):
    console = Console(file=io.StringIO(), width=width)
    print_probe(result, console)
    return console.file.getvalue()


def result_of(observation, *, family_more=None, measured=None, **more):
    family = Family(
        "a-family", observation.kind, "A title", ("book",), dtypes=ROWS, **(family_more or {})
    )
    facts = merge(observation, family)
    if measured is not None:
        facts = with_measurements(facts, measured)
    return ProbeResult((DeviceReport(facts, propose(facts)),), system="Linux", python="3", **more)


GPU = Observation(
    DeviceKind.CUDA,
    name="A [red]GPU[/red]\x1b[2J",
    compute_capability="8.0",
    memory_bytes=40 * 2**30,
    usable_cores=3,
    driver="580",
    notes=("a probe's note",),
)


def test_everything_that_is_known_is_shown():
    text = printed(
        result_of(
            GPU,
            family_more={"memory_bandwidth_gbps": 1555.0},
            measured=Measurements(
                "torch",
                (Product(DType.FLOAT32, gflops=15000.0), Product(DType.BFLOAT16, gflops=90000.0)),
                1234.5,
            ),
            frameworks=(FrameworkFact("torch", "2.13.0", "cuda 12.8"),),
            notes=("a machine's note",),
        )
    )
    for part in (
        "A title (family a-family), compute capability 8.0, 40.0 GiB memory",
        "3 usable processors, 1555 GB/s (vendor), 1234 GB/s (measured), driver 580",
        "native",
        "8, best 64",
        "1312",
        "15000",
        "recommended: mixed_bfloat16 (measured here with torch): ",
        "1. mixed_bfloat16: ",
        "refused mixed_float16: float16 is emulated: because of [bold]this[/bold]",
        "note: a probe's note",
        "note: a machine's note",
        "frameworks: torch 2.13.0 (cuda 12.8)",
    ):
        assert part in text, part


def test_what_is_not_known_is_left_out():
    text = printed(result_of(Observation(DeviceKind.CPU, partition="1g.5gb")))
    assert "GiB" not in text
    assert "partition 1g.5gb" in text
    assert "GFLOP/s" not in text
    assert "peak" not in text.split("recommended")[0].replace("peaks are left out", "")
    assert "none installed (pip install" in text


def test_names_are_text_and_never_steer_the_terminal():
    text = printed(result_of(GPU))
    assert "A [red]GPU[/red]\\x1b[2J" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [20, 80, 400])
def test_it_prints_at_any_width(width):
    assert printed(result_of(GPU), width)


def test_without_a_console_it_prints_to_stdout(capsys):
    print_probe(result_of(GPU))
    assert "recommended" in capsys.readouterr().out


@settings(deadline=None)
@given(st.text())
def test_foreign_text_is_made_printable(text):
    assert printable(text).replace("\n", "").isprintable()
    if text.isprintable():
        assert printable(text) == text
