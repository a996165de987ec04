"""Which devices a worker is shown: the one that is tuned, and no other."""

from __future__ import annotations

import pytest

from autoprec import api
from autoprec.core.device import DeviceKind, Observation, merge
from autoprec.hardware.catalogue import load_catalogue


def shown(**seen: object) -> dict[str, str]:
    observation = Observation(**seen)  # type: ignore[arg-type]
    return dict(api._visible(merge(observation, load_catalogue().family_of(observation))))


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_tuning_on_the_cpu_hides_every_gpu_by_what_is_a_variable_on_every_system(name: str):
    assert shown(kind=DeviceKind.CPU)[name] == "-1"


def test_an_amd_gpu_is_shown_by_its_place_before_hips_filter():
    assert shown(kind=DeviceKind.ROCM, index=0, uuid="2") == {"HIP_VISIBLE_DEVICES": "2"}
