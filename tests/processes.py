"""Who is still running: processes are found by a mark in their environment."""

from __future__ import annotations

import os
import time
from pathlib import Path

MARK = "AUTOPREC_TEST_MARK"


def survivors(mark: str, seconds: float = 10.0) -> list[str]:
    """Command lines of the processes that carry a mark and do not end within `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _marked(mark: str) -> list[str]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(Path(f"/proc/{name}/cmdline").read_text(errors="replace"))
        except OSError:
            continue
    return found
