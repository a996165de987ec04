"""`autoprec tune`: measure recipes, check the fastest against float32, write a profile."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from autoprec.cli import tune_cluster
from autoprec.errors import UNRESOLVED, Interrupted, UsageError

if TYPE_CHECKING:
    from autoprec.tuning.options import Options
    from autoprec.workers.task_source import TaskSource

_DESCRIPTION = """\
Train a model for a few steps with each plausible precision, batch size and other settings, check
that the fastest recipe trains like float32, and write it with its evidence to a profile.

FILE.py is a training script, as it is: it runs up to its own call of Lightning's or Keras's fit or
Transformers' train, and what that would train is tuned; nothing after the call runs. Or it is a
task file, which defines build_model() and build_data(batch_size), and for PyTorch loss_fn(outputs,
targets) or training_step(model, batch). If that sets BATCH_SIZE, it is kept as the effective batch
size; otherwise the batch size is chosen too.
"""

_EXAMPLES = f"""\
examples:
  autoprec tune train.py -- --lr 1e-3             the script with its arguments; train.profile.yaml
  autoprec tune train.py --at 2                   its second call of fit
  autoprec tune model.py                          write model.profile.yaml
  autoprec tune model.py --batch-sizes 16-512     only powers of two in this range
  autoprec tune model.py --time-limit 120 --json  two minutes in total; the profile as JSON
  autoprec tune model.py --policies mixed_float16 this policy, even if the rules refuse it
  autoprec tune model.py --grid --batch-sizes 32-512 --policies float32,bf16
                                                  a table of step times by batch and policy
  autoprec tune model.py --checkpoint last.pt     start from trained weights
  autoprec tune model.py --plan --device v100     what would be tried there, and what to expect
  autoprec tune model.py --quick                  what leads after some seconds, not yet checked
  autoprec tune model.py --nproc 4                one job on four devices (DistributedDataParallel)
  autoprec tune model.py --storage sqlite:///s.db keep the study in a database
{tune_cluster.EXAMPLES}
To resume a tuning that was stopped, run the same command again.

exit codes: 0 ok, 1 the task or a trial failed or the device is busy, 2 usage,
            3 no feasible recipe, 5 inconclusive (only with --strict), 130 interrupted
"""

#: Within so many seconds a small model has its answer from `--quick`.
_QUICK_SECONDS = 30.0


def add_parser(subparsers: Any) -> None:
    """Add the `tune` subcommand."""
    parser = subparsers.add_parser(
        "tune",
        help="find the fastest recipe for a task that still trains like float32",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "task",
        metavar="FILE.py",
        help="the training script, a function of it (train.py:build), or a task file",
    )
    parser.late, parser.rest = _add_options, "arguments"


def _add_options(parser: argparse.ArgumentParser) -> None:
    from autoprec.cli.settings import add_settings
    from autoprec.tuning.options import Arguments

    groups = add_settings(parser, Arguments)
    parser.set_defaults(device=None, at=1, script=False)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--plan",
        action="store_true",
        help="measure nothing: run one step on the CPU and print what would be tried on the "
        "device, what would be refused, and what to expect",
    )
    instead.add_argument(
        "--quick",
        action="store_true",
        help="search for some seconds and print the fastest recipe so far with its rough speed: "
        "nothing is checked, and no profile is written; without it the search goes on from there",
    )
    groups["search"].add_argument(
        "--grid",
        action="store_true",
        help="measure every recipe (--sampler grid) and print step times by batch and policy",
    )
    groups["study"].add_argument(
        "--report",
        nargs="?",
        const="",
        metavar="FILE.html",
        help="write a page about the result, too (default: next to the profile); see "
        "autoprec report",
    )
    tune_cluster.add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="print the profile as JSON on stdout")
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"exit with {UNRESOLVED} if the measurements contradict each other, so that nothing "
        "could be concluded and float32 was kept",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="print errors only")
    parser.add_argument(
        "--verbose", "-v", action="store_true", help="also print a table of all trials at the end"
    )


def run(arguments: argparse.Namespace) -> int:
    """Tune, print, and return the exit code."""
    nproc = ranks_to_tune(vars(arguments).get("nproc"))
    if nproc is None:
        return 0
    options = _options(arguments, nproc)
    cluster = tune_cluster.is_asked_for(arguments)
    if arguments.report is not None and (arguments.plan or cluster):
        raise UsageError(
            "--report is for a tuning on this machine; of a cluster's profiles, `autoprec report "
            "FOLDER` makes one"
        )
    with stop_signals_interrupt():
        if cluster:
            return tune_cluster.run(arguments, source_of(arguments), options)
        if arguments.plan:
            return _plan(arguments, options)
        if arguments.quick:
            return _quick(arguments, options)
        return _tune(arguments, options)


def _tune(arguments: argparse.Namespace, options: Options) -> int:
    from autoprec.api import check_output, check_report_path, report, tune
    from autoprec.cli.json_output import print_json
    from autoprec.profiles import default_path, default_report_path, place_for, to_mapping
    from autoprec.reporting.tune import Terminal
    from autoprec.tuning.events import silent

    source = source_of(arguments)
    task = source.path
    output = check_output(options.output or default_path(task), task)
    page = None
    if arguments.report is not None:
        page = check_report_path(Path(arguments.report or default_report_path(output)))
    terminal = Terminal(
        closing=not arguments.json,
        grid=arguments.grid,
        verbose=arguments.verbose,
        limit=options.time_limit,
    )
    with nullcontext(silent) if arguments.quiet else terminal as listener:
        try:
            profile = tune(source, device=arguments.device, options=options, listener=listener)
        except KeyboardInterrupt:
            raise Interrupted(_how_to_resume(task, options.storage)) from None
    if arguments.json:
        print_json(to_mapping(profile))
    if page is not None:
        if not arguments.report:  # the page of another profile stays, as that does
            page = default_report_path(place_for(profile, output))
        report(profile, output=page)
        if not arguments.quiet:
            print(f"the report is in {page}", file=sys.stderr)
    return UNRESOLVED if arguments.strict and profile.evidence.inconclusive else 0


def source_of(arguments: argparse.Namespace) -> TaskSource:
    """Return what the command line names; raise as `read_source` does."""
    from autoprec.workers.task_source import read_source

    return read_source(
        arguments.task, arguments=arguments.arguments, at=arguments.at, script=arguments.script
    )


def _how_to_resume(task: Path, storage: str | None) -> str:
    from autoprec.tuning.study.storage import default_journal

    place = storage or default_journal(task)
    return f"interrupted; finished trials are kept in {place}. Run the same command to resume"


def _options(arguments: argparse.Namespace, nproc: int) -> Options:
    from autoprec.cli.settings import settings_given
    from autoprec.tuning.options import Options

    given = {**settings_given(arguments), "nproc": nproc}
    if arguments.grid:
        given |= {"sampler": "grid", "extras": False}
    return Options(**given)


def _plan(arguments: argparse.Namespace, options: Options) -> int:
    """Print the plan on stdout, and return the exit code."""
    from autoprec.api import plan
    from autoprec.cli.json_output import print_json
    from autoprec.reporting.plan import print_plan
    from autoprec.tuning.events import Event, Note

    def say(event: Event) -> None:
        if isinstance(event, Note):
            print(f"autoprec: {event.text}", file=sys.stderr)

    if options.output is not None:
        raise UsageError("--plan writes no file; omit --output")
    try:
        made = plan(source_of(arguments), device=arguments.device, options=options, listener=say)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing was kept") from None
    if arguments.json:
        print_json(made)
    else:
        print_plan(made)
    return 0


def _quick(arguments: argparse.Namespace, options: Options) -> int:
    """Search for seconds, print the answer on stdout, and return the exit code."""
    from autoprec.api import answer_quickly
    from autoprec.reporting.tune import Terminal
    from autoprec.tuning.events import silent

    if options.output is not None or arguments.report is not None or arguments.json:
        raise UsageError("--quick writes no profile; omit --output, --report and --json")
    terminal = Terminal(limit=_QUICK_SECONDS)
    with nullcontext(silent) if arguments.quiet else terminal as listener:
        try:
            said = answer_quickly(
                source_of(arguments), device=arguments.device, options=options, listener=listener
            )
        except KeyboardInterrupt:
            raise Interrupted("interrupted; finished trials are kept") from None
    print(said)
    print(
        "no profile was written, only the trials are kept: the same command without --quick goes "
        "on from them, then times the fastest recipes in turns and checks the winner against "
        "float32"
    )
    return 0


def ranks_to_tune(nproc: int | None) -> int | None:
    """Return the number of ranks to tune for; None if another process of a launcher tunes.

    `nproc` is what was asked for; under a launcher such as torchrun it is the number of processes
    that this has started. The tuner starts ranks of its own, for every trial may end them: so the
    launcher's rank 0 tunes, and its others have nothing to do.
    """
    from autoprec.workers.environment import outer_launcher

    launcher = outer_launcher(os.environ)
    if launcher is None:
        return 1 if nproc is None else nproc
    if not launcher.one_machine:
        raise UsageError(
            f"a launcher started {launcher.world_size} processes on several machines, and a tuning "
            "runs on one: start `autoprec tune` on one of them, with --nproc"
        )
    if nproc not in (None, launcher.world_size):
        raise UsageError(
            f"--nproc {nproc} given, but the launcher started {launcher.world_size} processes: "
            "leave --nproc out, or start `autoprec tune` without a launcher"
        )
    if launcher.rank == 0:
        return launcher.world_size
    print(
        f"autoprec: rank 0 tunes with {launcher.world_size} rank processes of its own; "
        f"rank {launcher.rank} of the launcher has nothing to do and ends here",
        file=sys.stderr,
    )
    return None


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP stop a tuning as Ctrl-C does: workers end, trials are kept."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    kept = {name: signal.signal(getattr(signal, name), stop) for name in names}
    try:
        yield
    finally:
        for name, handler in kept.items():
            signal.signal(getattr(signal, name), handler)
