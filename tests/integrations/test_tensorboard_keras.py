"""A profile in TensorBoard's log, written through TensorFlow's summary writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from autoprec import log_to
from autoprec.profiles import dump_profile
from autoprec.tracking import scalars_of
from tests.integrations.tensorboard_log import read_log
from tests.reporting.page.test_page import won

pytestmark = pytest.mark.integrations


def test_a_file_writer(tmp_path: Path) -> None:
    profile = won()
    writer = tf.summary.create_file_writer(str(tmp_path))
    log_to(writer, profile)
    scalars, text = read_log(tmp_path)
    assert scalars == pytest.approx(scalars_of(profile))
    assert [line.removeprefix("    ") for line in text.splitlines()] == dump_profile(
        profile
    ).splitlines()
