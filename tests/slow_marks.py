"""Tells which tests without the mark `slow` use more than five seconds of processor time.

Processor time, of this process, of what it started and saw end, and of the workers that were forked
for it (`fork_server.py`), since a busy machine makes every test long. It differs between machines
all the same, by more than twice, so it fails no run unless `--slow-marks=error` is given, which
neither the Makefile nor CI does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

LIMIT_SECONDS = 5.0
_PROPERTY = "processor_seconds"


def _used(item: pytest.Item) -> float:
    """Return the processor time that was used until now, in seconds."""
    server = getattr(item, "funcargs", {}).get("forked")
    return sum(os.times()[:4]) + (server.processor_seconds() if server else 0.0)


class SlowMarks:
    """The plugin, in the processes that run tests and in the one that reports."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self.found: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        began = _used(item)
        try:
            return (yield)
        finally:
            item.user_properties.append((_PROPERTY, _used(item) - began))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        used = float(str(dict(report.user_properties).get(_PROPERTY, 0.0)))
        if report.when == "call" and used > LIMIT_SECONDS and "slow" not in report.keywords:
            self.found[report.nodeid] = used

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._strict and self.found and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found:
            terminalreporter.section(f"over {LIMIT_SECONDS:g} s of processor time without `slow`")
        for name, used in self.found.items():
            terminalreporter.line(f"{used:.0f} s {name}")
