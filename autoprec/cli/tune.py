"""`autoprec tune`: measure recipes, prove the fast one, write a profile."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from autoprec.cli import tune_cluster, tune_plan
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
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="where to write the profile (default: next to the task file); for a cluster, the "
        "folder of its profiles",
    )
    parser.add_argument(
        "--device",
        metavar="KIND[:INDEX]",
        help="cpu, cuda, rocm, xpu, mps or tpu (default: the best one here); with --plan also, by "
        "name, a device that need not be in this machine: v100, tpu v5e",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="measure nothing: run one step on the CPU and print what would be tried on the "
        "device, what would be refused, and what to expect",
    )
    _add_ranks(parser)
    _add_search(parser)
    _add_proof(parser)
    _add_study(parser)
    tune_cluster.add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="print the profile as JSON on stdout")
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"exit with {INCONCLUSIVE} if the measurements contradict each other, so that nothing "
        "could be concluded and float32 was kept",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="print errors only")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several devices")
    group.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="train on N devices of this kind, one process (rank) each; BATCH_SIZE is the batch of "
        "all together (default: 1; under torchrun, as many as it started)",
    )
    group.add_argument(
        "--engine",
        default="ddp",
        metavar="NAME",
        help="how the ranks share a step: ddp (default) or fsdp2",
    )


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--policies",
        metavar="P,P",
        help="exactly these policies, even those the rules refuse: float32, tf32, mixed_bfloat16, "
        "mixed_float16; short names such as bf16 and fp16 are accepted",
    )
    group.add_argument(
        "--batch-sizes",
        metavar="B,B|LOW-HIGH",
        help="micro-batches to try (default: 8-1024 on a CPU, 8-4096 elsewhere)",
    )
    group.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="run at most this many trials (default: until no recipe is worth another)",
    )
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="time for the whole tuning, shared by search, proof and confirmation; what could not "
        "be covered is reported (default: no limit)",
    )
    group.add_argument(
        "--search-limit",
        type=float,
        metavar="SECONDS",
        help="time for the search alone (default: no limit)",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="also try torch.compile (Keras: XLA is always tried)",
    )
    group.add_argument(
        "--align",
        type=int,
        metavar="N",
        help="try padding matrix dimensions to this multiple (default: what suits the device)",
    )
    group.add_argument(
        "--knob",
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="values to try for another knob, its default first, such as threads=2,1 (an unknown "
        "name lists all knobs)",
    )
    group.add_argument(
        "--no-extras",
        action="store_true",
        help="try only policy, batch size, memory layout and XLA, no other knobs",
    )
    group.add_argument(
        "--sampler",
        default="cost",
        metavar="NAME",
        help="cost (by the expected gain under a cost model, the default), tpe, grid or random",
    )
    group.add_argument(
        "--grid",
        action="store_true",
        help="measure every recipe (--sampler grid) and print step times by batch and policy",
    )
    group.add_argument(
        "--rounds",
        type=int,
        default=6,
        metavar="N",
        help="rounds of the interleaved timing of the fastest recipes and float32 (default: 6)",
    )
    group.add_argument(
        "--attribute",
        action="store_true",
        help="time every part of the speed-up by itself (batch, precision, each setting), not only "
        "what fits into seconds",
    )


def _add_proof(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("proof")
    group.add_argument(
        "--proof-steps",
        type=int,
        metavar="N",
        help="maximum steps of a proof (default: 8, 30, 120 or 480, by the cost of a float32 step)",
    )
    group.add_argument(
        "--proof-seconds",
        type=float,
        metavar="S",
        help="choose the steps of a proof so that it takes about this many seconds at most "
        "(default: 60)",
    )
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="start from the weights in this file (torch.save, .safetensors, .weights.h5 or "
        ".keras; the optimizer starts fresh), so that the proof covers late training",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="widen (above 1) or narrow (below 1) the limits of what counts as equal",
    )
    group.add_argument(
        "--accept-drift",
        action="store_true",
        help="accept a recipe that trains, but differently from float32",
    )
    group.add_argument(
        "--explain",
        action="store_true",
        help="show how large each module's numbers are under a 16-bit policy, and which modules "
        "stay in float32",
    )
    group.add_argument(
        "--float32-modules",
        action="append",
        default=[],
        metavar="PATTERN",
        help="keep this module in float32: its path, or a pattern that matches exactly one module",
    )


def _add_study(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("study")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed for all randomness (default: 0)"
    )
    group.add_argument(
        "--storage",
        metavar="PLACE",
        help="path of a journal file, or an Optuna storage URL (default: a journal in the user's "
        "cache directory; see autoprec studies)",
    )
    group.add_argument(
        "--report",
        nargs="?",
        const="",
        metavar="FILE.html",
        help="write a page about the result, too (default: next to the profile); see "
        "autoprec report",
    )
    group.add_argument("--fresh", action="store_true", help="discard earlier trials of this study")
    group.add_argument(
        "--wait", action="store_true", help="wait if another tuning is using the device"
    )


def run(arguments: argparse.Namespace) -> int:
    """Tune, print, and return the exit code."""
    from autoprec.api import check_output, check_report_path, report, tune
    from autoprec.profiles import default_path, default_report_path, place_for, to_mapping
    from autoprec.reporting.tune import Quiet, Terminal
    from autoprec.workers.task_file import check_task_path

    nproc = ranks_to_tune(arguments.nproc)
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
            limit=arguments.time_limit,
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
    from autoprec.core.dtypes import Policy
    from autoprec.core.speed.space import parse_batch_sizes
    from autoprec.tuning.options import Options

    names = (arguments.policies or "").split(",")
    batches = arguments.batch_sizes
    return Options(
        output=arguments.output,
        policies=tuple(dict.fromkeys(Policy.parse(name) for name in names if name.strip())),
        batch_sizes=None if batches is None else parse_batch_sizes(batches),
        trials=arguments.trials,
        time_limit=arguments.time_limit,
        search_limit=arguments.search_limit,
        proof_steps=arguments.proof_steps,
        proof_seconds=arguments.proof_seconds,
        tolerance=arguments.tolerance,
        checkpoint=arguments.checkpoint,
        accept_drift=arguments.accept_drift,
        attribute=arguments.attribute,
        explain=arguments.explain,
        float32_modules=tuple(arguments.float32_modules),
        compile=arguments.compile,
        align=arguments.align,
        knobs=dict(_parse_knob(text) for text in arguments.knob),
        extras=not (arguments.no_extras or arguments.grid),
        sampler="grid" if arguments.grid else arguments.sampler,
        seed=arguments.seed,
        storage=arguments.storage,
        fresh=arguments.fresh,
        wait=arguments.wait,
        rounds=arguments.rounds,
        nproc=nproc,
        engine=arguments.engine,
    )


def _parse_knob(text: str) -> tuple[str, tuple[bool | int | str, ...]]:
    name, separator, values = text.partition("=")
    if not separator or not values:
        raise UsageError(f"--knob {text!r} given, expected NAME=VALUE,VALUE such as threads=2,1")
    return name.strip(), tuple(_parse_level(value.strip()) for value in values.split(","))


def _parse_level(text: str) -> bool | int | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isascii() and text.isdigit() else text
