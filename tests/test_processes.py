"""Processes of the tests: who is left is found by a mark, and who tunes waits for nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.processes import MARK, name_of, survivors, undisturbed

LEAVES_ONE = """
import os, sys, time
from pathlib import Path
if (child := os.fork()) == 0:
    os.setsid()
    os.closerange(0, 3)
    time.sleep(60)
    os._exit(0)
print(child)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")
def test_what_a_forked_process_leaves_is_found(forked: ForkServer, tmp_path: Path) -> None:
    script, mark = tmp_path / "leaves_one.py", uuid.uuid4().hex
    script.write_text(LEAVES_ONE)
    left = int(forked.run(script, environment={**os.environ, MARK: mark}).stdout)
    try:
        assert len(survivors(mark, 0.0)) == 1
        assert survivors(uuid.uuid4().hex, 0.0) == []
    finally:
        os.kill(left, signal.SIGKILL)
    assert survivors(mark) == []


def test_a_name_is_of_its_mark_and_short() -> None:
    assert len(name_of("a")) == 15
    assert name_of("a") != name_of("b")


def test_a_process_that_no_test_starts_itself_waits_for_nobody_and_times_no_products() -> None:
    code = "from autoprec import probing; from autoprec.tuning import job; "
    code += "print(job.PATIENCE_SECONDS, probing.measure_device('as it was', {}))"
    environment = {**os.environ, **undisturbed()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0.0 as it was\n"
