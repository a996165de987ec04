"""A profile in TensorBoard's log, written through TensorFlow's summary writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from autoprec import log_to
from autoprec.core.numerics.watching import WatchedStep
from autoprec.profiles import dump_profile
from autoprec.tracking import scalars_of, series_of
from tests.integrations.tensorboard_log import read_log
from tests.reporting.page.test_page import won

pytestmark = pytest.mark.integrations
WATCHED = WatchedStep(100, 8, 8, 0.01, -0.002, 0.03, 0.0)


def test_a_file_writer(tmp_path: Path) -> None:
    profile = won()
    writer = tf.summary.create_file_writer(str(tmp_path))
    log_to(writer, profile, watched=[WATCHED])
    scalars, text = read_log(tmp_path)
    assert scalars == pytest.approx(scalars_of(profile) | dict(series_of([WATCHED])[0][1]))
    assert [line.removeprefix("    ") for line in text.splitlines()] == dump_profile(
        profile
    ).splitlines()
