"""A profile in TensorBoard's log, written through PyTorch's SummaryWriter."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec import log_to
from autoprec.core.numerics.watching import WatchedStep
from autoprec.profiles import dump_profile
from autoprec.tracking import scalars_of, series_of
from tests.integrations.tensorboard_log import read_log
from tests.reporting.page.test_page import won

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("without_tensorflow")]
WATCHED = WatchedStep(100, 8, 8, 0.01, -0.002, 0.03, 0.0)


def test_a_summary_writer(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    profile = won()
    with SummaryWriter(str(tmp_path)) as writer:
        log_to(writer, profile, watched=[WATCHED])
        scalars, text = read_log(tmp_path)
    assert scalars == pytest.approx(scalars_of(profile) | dict(series_of([WATCHED])[0][1]))
    lines = [line.removeprefix("    ") for line in text.splitlines()]
    assert lines == dump_profile(profile).splitlines()
    (page,) = tmp_path.glob("*.report.html")
    assert "<svg" in page.read_text(encoding="utf-8")
