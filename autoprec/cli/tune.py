"""`autoprec tune`: measure, prove, choose; write a profile."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from autoprec.errors import Interrupted, UsageError

_DESCRIPTION = """\
Really train a few steps of the task's model with each plausible precision, prove that the fast one
trains like float32, tune the batch size and the other knobs, and write the winner with its evidence
into a profile.

A task file defines build_model() and build_data(batch_size), and for PyTorch loss_fn(outputs,
targets) or training_step(model, batch). BATCH_SIZE in it is kept as the effective batch; without it
the batch is chosen too.
"""

_EXAMPLES = """\
examples:
  autoprec tune model.py                          writes model.profile.yaml
  autoprec tune model.py --batch-sizes 16-512     powers of two in this range only
  autoprec tune model.py --time-limit 120 --json  two minutes in all; the profile as JSON
  autoprec tune model.py --policies mixed_float16 this policy whatever the rules say
  autoprec tune model.py --grid --batch-sizes 32-512 --policies float32,bf16
                                                  a table of step times by batch and policy
  autoprec tune model.py --checkpoint last.pt     from trained weights: late breaks show soon
  autoprec tune model.py --plan --device v100     what would be tried there, and what to expect
  autoprec tune model.py --storage sqlite:///s.db the study in a database

A tuning that was stopped goes on where it stopped when the same command is run again.

exit codes: 0 ok, 1 the task or a trial failed or the device is busy, 2 usage,
            3 no feasible recipe, 5 inconclusive (only with --strict), 130 interrupted
"""

#: The exit code of an inconclusive tuning, where `--strict` asks for one.
INCONCLUSIVE = 5


def add_parser(subparsers: Any) -> None:
    """Add the `tune` subcommand."""
    parser = subparsers.add_parser(
        "tune",
        help="measure, prove and choose the fastest recipe for a task file",
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
        help="where the profile goes (default: beside the task)",
    )
    parser.add_argument(
        "--device",
        metavar="KIND[:INDEX]",
        help="cpu, cuda, rocm, xpu, mps or tpu (default: best); with --plan also one that need not "
        "be here, by name: v100, tpu v5e",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="measure nothing: take one step on the CPU, and print what would be tried on the "
        "device, what is refused, and what can be expected",
    )
    _add_search(parser)
    _add_proof(parser)
    _add_study(parser)
    parser.add_argument("--json", action="store_true", help="print the profile as JSON on stdout")
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"exit with {INCONCLUSIVE} where the measurements contradict each other, so that "
        "nothing could be concluded and float32 was kept",
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="say nothing but errors")


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--policies",
        metavar="P,P",
        help="exactly these policies, whatever the rules refuse: float32, tf32, mixed_bfloat16, "
        "mixed_float16; short names such as bf16 and fp16 are understood",
    )
    group.add_argument(
        "--batch-sizes", metavar="B,B|LOW-HIGH", help="micro-batches to try (default: 8-1024)"
    )
    group.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="at most this many trials (default: until none is worth it)",
    )
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="end the tuning after so many seconds: search, proof and confirmation share them, and "
        "what was not covered is said (default: no limit)",
    )
    group.add_argument(
        "--search-limit",
        type=float,
        metavar="SECONDS",
        help="end the search alone after so many seconds (default: no limit)",
    )
    group.add_argument(
        "--compile", action="store_true", help="try torch.compile too (Keras: XLA always is)"
    )
    group.add_argument(
        "--align",
        type=int,
        metavar="N",
        help="try padding matrix dimensions to this multiple (default: what the device wants)",
    )
    group.add_argument(
        "--knob",
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="levels of a further knob, its default first, such as threads=2,1 (an unknown name "
        "lists them all)",
    )
    group.add_argument(
        "--no-extras",
        action="store_true",
        help="try no further knobs of autoprec's own choice, only policy, batch, layout and XLA",
    )
    group.add_argument(
        "--sampler",
        default="cost",
        metavar="NAME",
        help="cost (a cost model's expected gain, the default), tpe, grid or random",
    )
    group.add_argument(
        "--grid",
        action="store_true",
        help="measure every recipe (--sampler grid) and print the step times by batch and policy",
    )
    group.add_argument(
        "--rounds",
        type=int,
        default=6,
        metavar="N",
        help="rounds in which the fastest recipes and float32 run in turns at the end (default: 6)",
    )


def _add_proof(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("proof")
    group.add_argument(
        "--proof-steps",
        type=int,
        metavar="N",
        help="the most steps of a proof (default: 8, 30, 120 or 480, by what a float32 step costs)",
    )
    group.add_argument(
        "--proof-seconds",
        type=float,
        metavar="S",
        help="choose the steps of a proof so that it takes about so long at most (default: 60)",
    )
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="begin with the weights of this file (of torch.save, .safetensors, .weights.h5 or "
        ".keras; the optimizer is new), so that the proof starts where late breaks show soon",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="widen (above 1) or narrow (below 1) what counts as equal",
    )
    group.add_argument(
        "--accept-drift",
        action="store_true",
        help="accept a recipe that trains, but not like float32",
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
        help="keep this module in float32: a path, or a pattern with exactly one match",
    )


def _add_study(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("study")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of everything drawn (default: 0)"
    )
    group.add_argument(
        "--storage",
        metavar="PLACE",
        help="a journal file's path or an Optuna storage URL (default: beside the task)",
    )
    group.add_argument("--fresh", action="store_true", help="forget earlier trials of this study")
    group.add_argument(
        "--wait", action="store_true", help="wait while another tuning uses the device"
    )


def run(arguments: argparse.Namespace) -> int:
    """Tune, print, and return the exit code."""
    from autoprec.api import check_output, tune
    from autoprec.profiles import default_path, to_mapping
    from autoprec.reporting.tune import Quiet, Terminal
    from autoprec.workers.task_file import check_task_path

    options = _options(arguments)
    if arguments.plan:
        return _plan(arguments, options)
    task = check_task_path(arguments.task)
    output = check_output(options.output or default_path(task), task)
    listener = (
        Quiet()
        if arguments.quiet
        else Terminal(
            output,
            closing=not arguments.json,
            grid=arguments.grid,
            limit=arguments.time_limit,
        )
    )
    with _stop_signals_interrupt(), listener:
        try:
            profile = tune(task, device=arguments.device, options=options, listener=listener)
        except KeyboardInterrupt:
            raise Interrupted(_how_to_resume(task, options.storage)) from None
        except OSError as error:
            raise UsageError(
                f"{output} could not be written: {error.strerror or error}. The study is kept: "
                "free some space or choose another --output, and run the same command again"
            ) from error
    if arguments.json:
        json.dump(to_mapping(profile), sys.stdout, indent=2)
        print()
    return INCONCLUSIVE if arguments.strict and profile.evidence.inconclusive else 0


def _plan(arguments: argparse.Namespace, options: Any) -> int:
    """Print the plan on stdout, and return the exit code."""
    from autoprec.api import plan
    from autoprec.core.codec import to_plain
    from autoprec.reporting.plan import print_plan
    from autoprec.tuning.events import Event, Note

    def say(event: Event) -> None:
        if isinstance(event, Note):
            print(f"autoprec: {event.text}", file=sys.stderr)

    if options.output is not None:
        raise UsageError("--plan writes no file; leave --output out")
    with _stop_signals_interrupt():
        try:
            made = plan(arguments.task, device=arguments.device, options=options, listener=say)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; a plan keeps nothing") from None
    if arguments.json:
        json.dump(to_plain(made), sys.stdout, indent=2)
        print()
    else:
        print_plan(made)
    return 0


def _how_to_resume(task: Path, storage: str | None) -> str:
    from autoprec.tuning.study_storage import default_journal

    place = storage or default_journal(task)
    return f"interrupted; finished trials are kept in {place}. Run the same command to go on"


@contextmanager
def _stop_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a tuning as Ctrl-C does: workers ended, trials kept."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    kept = {name: signal.signal(getattr(signal, name), stop) for name in names}
    try:
        yield
    finally:
        for name, handler in kept.items():
            signal.signal(getattr(signal, name), handler)


def _options(arguments: argparse.Namespace) -> Any:
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
