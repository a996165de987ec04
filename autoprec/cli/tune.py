"""`autoprec tune`: measure recipes, prove the fast one, write a profile."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from autoprec.cli import tune_cluster, tune_plan, tune_quick
from autoprec.cli.launched import ranks_to_tune
from autoprec.cli.stop_signals import stop_signals_interrupt
from autoprec.errors import Interrupted, UsageError

_DESCRIPTION = """\
Train the task's model for a few steps with each plausible precision, batch size and other settings,
prove that the fastest recipe trains like float32, and write it with its evidence to a profile.

A task file defines build_model() and build_data(batch_size), and for PyTorch loss_fn(outputs,
targets) or training_step(model, batch). If it sets BATCH_SIZE, that is kept as the effective batch
size; otherwise the batch size is chosen too.
"""

_EXAMPLES = f"""\
examples:
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

#: The exit code of an inconclusive tuning, where `--strict` asks for one.
INCONCLUSIVE = 5


def add_parser(subparsers: Any) -> None:
    """Add the `tune` subcommand."""
    parser = subparsers.add_parser(
        "tune",
        help="find the fastest recipe for a task that still trains like float32",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", metavar="TASK.py", help="the task file")
    parser.late = _add_options


def _add_options(parser: argparse.ArgumentParser) -> None:
    from autoprec.cli.settings import add_settings
    from autoprec.tuning.options import Arguments

    groups = add_settings(parser, Arguments)
    parser.set_defaults(device=None)
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
        help=f"exit with {INCONCLUSIVE} if the measurements contradict each other, so that nothing "
        "could be concluded and float32 was kept",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="print errors only")
    parser.add_argument(
        "--verbose", "-v", action="store_true", help="also print a table of all trials at the end"
    )


def run(arguments: argparse.Namespace) -> int:
    """Tune, print, and return the exit code."""
    from autoprec.api import check_output, check_report_path, report, tune
    from autoprec.profiles import default_path, default_report_path, place_for, to_mapping
    from autoprec.reporting.tune import Quiet, Terminal
    from autoprec.workers.task_file import check_task_path

    nproc = ranks_to_tune(vars(arguments).get("nproc"))
    if nproc is None:
        return 0
    options = _options(arguments, nproc)
    if arguments.report is not None and (arguments.plan or tune_cluster.is_asked_for(arguments)):
        raise UsageError(
            "--report is for a tuning on this machine; of a cluster's profiles, `autoprec report "
            "FOLDER` makes one"
        )
    if tune_cluster.is_asked_for(arguments):
        with stop_signals_interrupt():
            return tune_cluster.run(arguments, options)
    if arguments.plan:
        return tune_plan.run(arguments, options)
    if arguments.quick:
        return tune_quick.run(arguments, options)
    task = check_task_path(arguments.task)
    output = check_output(options.output or default_path(task), task)
    page = None
    if arguments.report is not None:
        page = check_report_path(Path(arguments.report or default_report_path(output)))
    listener = (
        Quiet()
        if arguments.quiet
        else Terminal(
            output,
            closing=not arguments.json,
            grid=arguments.grid,
            verbose=arguments.verbose,
            limit=options.time_limit,
            place_for=place_for,
        )
    )
    with stop_signals_interrupt(), listener:
        try:
            profile = tune(task, device=arguments.device, options=options, listener=listener)
        except KeyboardInterrupt:
            raise Interrupted(_how_to_resume(task, options.storage)) from None
        except OSError as error:
            raise UsageError(
                f"{output} could not be written: {error.strerror or error}. The trials are "
                "kept: free some space or choose another --output, and run the command again"
            ) from error
    if arguments.json:
        json.dump(to_mapping(profile), sys.stdout, indent=2)
        print()
    if page is not None:
        if not arguments.report:  # the page of another profile stays, as that does
            page = default_report_path(place_for(profile, output))
        report(profile, output=page)
        if not arguments.quiet:
            print(f"the report is in {page}", file=sys.stderr)
    return INCONCLUSIVE if arguments.strict and profile.evidence.inconclusive else 0


def _how_to_resume(task: Path, storage: str | None) -> str:
    from autoprec.tuning.study.places import default_journal

    place = storage or default_journal(task)
    return f"interrupted; finished trials are kept in {place}. Run the same command to resume"


def _options(arguments: argparse.Namespace, nproc: int) -> Any:
    from autoprec.cli.settings import settings_given
    from autoprec.tuning.options import Options

    given = {**settings_given(arguments), "nproc": nproc}
    if arguments.grid:
        given |= {"sampler": "grid", "extras": False}
    return Options(**given)
