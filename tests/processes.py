"""Tunings in processes of their own, and who is still running (found by an environment mark).

Of a process that was forked and runs no other program, the system shows the environment of the one
it was forked from: it takes a name from its mark (`tests/fork_server.py`), which those that it
forks have, too.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

MARK = "AUTOPREC_TEST_MARK"
SITE = Path(__file__).parent / "child_site"

#: The command line, but no tuning waits for other processes, because two files of tests run side by
#: side, and none times the device's matrix products, which takes seconds and has its own tests.
_SET_UP = """
import sys
from autoprec import cli, probing
from autoprec.tuning import job
job.PATIENCE_SECONDS = 0.0
probing.measure_device = lambda facts, software: facts
"""

#: What starts `autoprec` in a test's child process; the words of its command line follow.
AUTOPREC = (sys.executable, "-c", f"{_SET_UP}sys.exit(cli.main())")

#: The same in a process that has imported a framework already: its workers are forked from it.
AUTOPREC_FORKING = f"""{_SET_UP}
from tests.fork_server import ForkServer, forked_workers
server = ForkServer()
assert server.pid
try:
    with forked_workers(server):
        sys.exit(cli.main())
finally:
    server.stop()
"""


def undisturbed() -> dict[str, str]:
    """What is set for processes of which `child_site/sitecustomize.py` makes what `AUTOPREC` is."""
    return {"PYTHONPATH": os.pathsep.join([str(SITE), os.environ["PYTHONPATH"]])}


def name_of(mark: str) -> str:
    """The name of a forked process with this mark; one has at most 15 characters."""
    return hashlib.sha256(mark.encode()).hexdigest()[:15]


def survivors(mark: str, seconds: float = 10.0) -> list[str]:
    """Command lines of the processes that carry a mark and do not end within `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _marked(mark: str) -> list[str]:
    wanted, named = f"{MARK}={mark}".encode(), name_of(mark)
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            shown = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            if wanted in shown or Path(f"/proc/{name}/comm").read_text().strip() == named:
                found.append(Path(f"/proc/{name}/cmdline").read_text(errors="replace"))
        except OSError:
            continue
    return found
