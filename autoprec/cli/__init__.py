"""The command line: arguments in, exit code out.

Data goes to stdout, messages to stderr. Each subcommand is a module with `add_parser(subparsers)`
and `run(arguments) -> int`; it imports what is slow inside `run`, so that `--help` stays fast.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from autoprec.cli import (
    check,
    diff,
    export,
    fleet,
    probe,
    report,
    schema,
    show,
    studies,
    tune,
    verify,
)
from autoprec.cli.parser import SHELLS, Parser, PrintCompletion
from autoprec.errors import AutoprecError, Interrupted, UserCodeError
from autoprec.reporting.flags import with_flags
from autoprec.version import __version__

COMMANDS = (probe, tune, check, verify, show, report, diff, studies, export, schema, fleet)

_EXIT_CODES = """\
exit codes:
  0    ok
  1    the task or a trial failed
  2    an invalid argument, option or file
  3    no feasible recipe
  4    the profile does not match this device
  5    tune --strict: the measurements are inconclusive; verify: a claim fails
  130  interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `autoprec` with all its subcommands."""
    parser = Parser(
        prog="autoprec",
        description="Find the fastest training precision that still trains like float32.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"autoprec {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show Python tracebacks")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        metavar="SHELL",
        help=f"print a script that completes this command in a shell ({', '.join(SHELLS)})",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = build_parser().parse_args(argv)
    command = {module.__name__.rpartition(".")[2]: module for module in COMMANDS}[arguments.command]
    try:
        return int(command.run(arguments))
    except AutoprecError as error:
        if arguments.traceback:
            raise
        with _interrupts_ignored():
            said = str(error)
            if not isinstance(error, UserCodeError):  # what they call `seed` is no flag
                said = with_flags(said)
            elif error.frames:
                print(_frames_without_message(error.frames, said), end="", file=sys.stderr)
            print(f"autoprec: {said}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if arguments.traceback:
            raise
        with _interrupts_ignored():
            print("autoprec: interrupted", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:
        _discard_stdout()
        return 0


def _frames_without_message(frames: str, message: str) -> str:
    """Drop the last lines of a traceback if the message that follows repeats them."""
    lines = frames.rstrip().splitlines(keepends=True)
    for start in range(len(lines)):
        if "".join(lines[start:]).strip() in message:
            return "".join(lines[:start])
    return "".join([*lines, "\n"])


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore SIGINT while the final message is printed: there is nothing left to interrupt."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread, where no signal arrives
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _discard_stdout() -> None:
    """Keep Python from complaining at exit that the reader of a pipe has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
