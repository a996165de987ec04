"""Plans of a described task for every family that the catalogue knows, and nothing is written."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from factories import device_of_family
from rich.console import Console

from autoprec import api
from autoprec.core.device.facts import GIB
from autoprec.core.device.merging import merge
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Dimension, Kernel, TaskFacts
from autoprec.core.speed.step_bounds import COMMON_MEMORY_GIB, Plan
from autoprec.errors import UsageError
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.name_lookup import with_vendor_figures
from autoprec.reporting.plan import print_plan
from autoprec.tuning.events import silent
from autoprec.tuning.flow.plan import plan_for
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.workers.task_source import TaskSource

CUDA = DeviceKind.CUDA
FAMILIES = load_catalogue().names
MLP = TaskFacts(
    "torch",
    {},
    32,
    32,
    parameters=1000,
    parameter_bytes=4000,
    trainable_bytes=4000,
    saved_bytes_per_sample=1000.0,
    optimizer_share=0.3,
    threads=2,
    kernels=(Kernel(1e6, 1e3, 4000, count=6),),
    dimensions=(Dimension("0", "Linear", "in_features", 100),),
)


def planned(name: str, options: Options | None = None) -> Plan:
    device, catalogue = device_of_family(name), load_catalogue()
    row = with_vendor_figures(catalogue, catalogue.family(name))
    cpu = Observation(DeviceKind.CPU)
    target = Target(merge(cpu, catalogue.family_of(cpu)), {}, lambda facts, _: facts)
    job = TuningJob(TaskSource(Path("task.py")), target, options or Options(), silent)
    return plan_for(job, MLP, device, device_of_family(row.name))


def shown(plan: Plan) -> str:
    console = Console(width=400, record=True, file=io.StringIO())
    print_plan(plan, console)
    return console.export_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_the_catalogue_is_planned_for(name: str) -> None:
    plan = planned(name)
    device = plan.device
    assert plan.recipes == len(plan.space.points()) >= len(plan.space.batch_sizes)
    for policy in plan.proposal.policies:
        assert policy in plan.space.policies
    for each in plan.estimates:
        assert each.policy in plan.space.policies
        assert each.at_most >= 1.0
    assert bool(plan.figures) == bool(plan.estimates)
    text = shown(plan)
    assert device.title in text
    assert "not in this machine" in text
    assert "nothing was measured" in text
    assert "samples/s" not in text
    for refusal in plan.proposal.refusals:
        assert refusal.reason in text


def test_a_family_without_figures_takes_those_of_its_first_product() -> None:
    assert planned("nvidia-v100").figures == "NVIDIA V100 SXM2"
    assert planned("nvidia-v100-pcie").figures == "NVIDIA V100 PCIe"
    assert "figures of NVIDIA V100 SXM2" in shown(planned("nvidia-v100"))


def test_a_product_is_not_reckoned_with_anothers_figures() -> None:
    """The M1 has no bandwidth in its row, and the M1 Pro is twice as fast."""
    assert planned("apple-m1").figures == ""
    assert planned("nvidia-a100").figures == "NVIDIA A100 SXM4 40 GB"
    part = replace(
        device_of_family("nvidia-a100"), observation=Observation(CUDA, partition="3g.20gb")
    )
    assert api._reference_device(part) == part


def test_this_machines_memory_is_not_that_of_a_cpu_elsewhere() -> None:
    found = {each.memory_bytes / GIB for each in planned("amd-zen4").memory.fits}
    assert found == set(COMMON_MEMORY_GIB)


def test_a_p100_has_no_tensor_cores_for_float16() -> None:
    assert "float16 is emulated (no Tensor Cores" in planned("nvidia-p100").expectation[0]


def test_dimensions_that_are_off_the_alignment_are_named() -> None:
    assert "0 (in_features 100)" in shown(planned("nvidia-a100"))


def test_what_was_asked_for_is_planned() -> None:
    options = Options(policies=(Policy.MIXED_FLOAT16,), batch_sizes=(16, 64))
    plan = planned("nvidia-v100", options)
    assert plan.space.batch_sizes == (16, 64)
    assert {each.batch for each in plan.estimates} == {16, 64}
    with pytest.raises(UsageError, match="has no TF32"):
        api.plan(Path(__file__), device="v100", policies="tf32")
