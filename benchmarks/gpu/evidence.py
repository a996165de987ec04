"""What a CUDA GPU brings, in under ten minutes: tests, tunings, speed, overhead and numerics.

    make gpu-evidence                                     all that is not measured yet
    python -m benchmarks.gpu.evidence --only tests grid-mlp --again
    python -m benchmarks.gpu.evidence --output FOLDER     what came of it goes there

It installs nothing. Each piece is a process of its own with a time limit, and its result a file
of JSON lines, gpu_PIECE-DATE-DEVICE.jsonl, written as they come. A piece whose result of this
commit, software and device is there already, in the output folder or in benchmarks/results/, is not
measured again, so that the same command goes on where it stopped. A piece that fails, runs out of
time or is interrupted is told at the end, with exit code 1 or 130; what it saw until then is kept
and marked as failed. Next time a `real-` piece measures what is missing, any other all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: What to do where something is missing.
INSTALL_HINT = (
    "nothing is installed here: run this with a Python that has what pyproject.toml names, or make "
    "one ('python -m venv .venv', '.venv/bin/pip install -e .[torch,dev]')"
)

try:
    from autoprec.api import probe
    from autoprec.core.codec import to_plain
    from autoprec.core.device.facts import DeviceFacts
    from autoprec.core.device.observation import DeviceKind
    from autoprec.core.device.placement import expose_only
    from autoprec.errors import AutoprecError
    from benchmarks.checkout import RESULTS, ROOT, child_environment
    from benchmarks.gpu.piece_files import (
        NOT_DONE,
        PieceResult,
        bare_rows,
        begun,
        known,
        path_of,
        row_text,
        write,
    )
    from benchmarks.provenance import machine
except ImportError as missing:
    raise SystemExit(
        f"{sys.executable} lacks {missing.name or missing}; {INSTALL_HINT}"
    ) from missing

#: Seconds that each piece may take, in the order in which they run: what says most about a model
#: that people train comes first, for time may be over before all are done.
LIMIT_SECONDS: Mapping[str, float] = {
    "device": 30,
    "products": 60,
    "real-gpt2": 170,
    "real-resnet50": 110,
    "tune-gpt2": 170,
    "real-llama_blocks": 110,
    "real-bert_512": 110,
    "tune-resnet50": 170,
    "real-vit_b16": 100,
    "real-unet": 100,
    "real-imagenette": 110,
    "real-bert_128": 100,
    "tune-bert_512": 170,
    "real-mlp8192": 80,
    "real-gpt2_rounded": 120,
    "real-mobilenet32": 90,
    "tests": 150,
    "overhead": 90,
    "numerics": 150,
    "tune-mlp": 170,
    "grid-mlp": 100,
    "tune-encoder": 170,
    "grid-encoder": 100,
    "tune-gpt": 170,
    "grid-gpt": 100,
    "tune-unet": 170,
    "grid-unet": 100,
    "grid-tiny": 100,
}
#: The module whose process runs a piece.
PIECE_MODULE = "benchmarks.gpu.pieces"

#: How the pieces begin that go on in the middle.
RESUMED = "real-"

#: For a dry run alone, and what that leaves out: more of the same with another task.
QUICK_PIECES = ("grid-tiny",)
FULL_PIECES = tuple(
    name
    for name in LIMIT_SECONDS
    if name.startswith(("tune-", "grid-")) and name not in ("tune-gpt2", *QUICK_PIECES)
)

#: All pieces together; one that has less than this left is not begun.
TOTAL_MINUTES = 9.5
SHORTEST_SECONDS = 5.0

_END_SECONDS = 5.0


def device_of(name: str) -> DeviceFacts:
    """The one device that is measured; `SystemExit` where there is none, or a choice."""
    try:
        found = [report.facts for report in probe(device=name).devices]
    except AutoprecError as error:
        raise SystemExit(f"no device to measure: {error}") from error
    if found[0].observation.hypothetical:
        raise SystemExit(f"no device to measure: {name!r} is not here, expected one such as cuda:0")
    if len(found) > 1:
        shown = "; ".join(f"{facts.name}: {facts.observation.uuid}" for facts in found)
        raise SystemExit(
            f"{len(found)} devices given, expected one: CUDA_VISIBLE_DEVICES=UUID of {shown}"
        )
    return found[0]


def no_evidence(facts: DeviceFacts, quick: bool) -> str:
    """Why what is measured here shows nothing of a GPU; nothing where it does."""
    why = ["a rehearsal"] if facts.observation.rehearsal else []
    why += ["on the CPU"] if facts.kind is DeviceKind.CPU else []
    return ", ".join([*why, "a dry run"] if quick else why)


def source() -> str:
    """A digest of the program: what is measured, where the commit alone does not say it."""
    digest = hashlib.sha256()
    for folder in ("autoprec", "benchmarks", "profiles", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml", ".cpp"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def head_of(facts: DeviceFacts, arguments: argparse.Namespace) -> dict[str, Any]:
    """What every line begins with."""
    head = machine(arguments.device)
    if arguments.commit:
        head["commit"] = arguments.commit
    why = no_evidence(facts, arguments.quick)
    return {**head, "source": source(), **({"no_evidence": why} if why else {})}


@dataclass(frozen=True)
class Order:
    """What a process is to measure: a piece, whole or dry, and what of it is measured already.

    It has `seconds` for it, and writes to `path` with `head` in every line.
    """

    piece: str
    quick: bool
    seconds: float
    path: Path
    head: Mapping[str, Any] = field(default_factory=dict)
    earlier: tuple[dict[str, Any], ...] = ()


def run_piece(order: Order, facts: DeviceFacts) -> PieceResult:
    """Run a piece in a process of its own, ended with all that it started when its time is over.

    It is shown the one device alone.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        given, errors = Path(folder) / "given.json", Path(folder) / "errors"
        told = {"head": order.head, "earlier": order.earlier, "facts": to_plain(facts)}
        given.write_text(json.dumps(told))
        lines = [row_text(order.piece, order.head, row, NOT_DONE) for row in order.earlier]
        order.path.write_text("".join(f"{line}\n" for line in lines))
        command = [sys.executable, "-m", PIECE_MODULE, order.piece, order.path]
        command += ["--device", facts.kind.value, "--given", given]
        command += ["--quick"] if order.quick else []
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")}
        variables |= {"REAL_TASK_SIZE": "tiny" if order.quick else "full"}
        interrupted = False
        with errors.open("wb") as log:
            try:
                with defer_interrupts():
                    child = subprocess.Popen(
                        [str(word) for word in command],
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        env=child_environment(
                            **expose_only(facts.observation).environment, **variables
                        ),
                    )
                code = child.wait(order.seconds)
                failed = f"ended with code {code}" if code else ""
            except subprocess.TimeoutExpired:
                failed = f"ran out of its {order.seconds:.3g} s"
            except KeyboardInterrupt:
                failed, interrupted = "interrupted", True
            finally:
                end(child)
        last = errors.read_text(errors="replace").strip().splitlines()[-1:]
        said = f"{failed}: {last[0][:300]}" if failed and last else failed
        return PieceResult(bare_rows(order.path, order.head), said, interrupted)


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Let what is inside be done before an interrupt counts: a process that started is known."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = {each: signal.signal(each, lambda number, _: came.append(number)) for each in numbers}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def end(child: subprocess.Popen[bytes]) -> None:
    """End a piece and its processes; workers end by themselves when it is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_SECONDS)


def check_output(folder: Path) -> None:
    """Make the folder now; `SystemExit` where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SystemExit(
            f"nothing can be written to {folder} ({error}): give --output FOLDER"
        ) from error


def check_software(installed: Callable[[str], str | None]) -> None:
    """`SystemExit` where something that autoprec needs is not there, or torch is too old."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = project["optional-dependencies"]["torch"]
    names = [re.split(r"[><=;\[ ]", each)[0] for each in (*project["dependencies"], torch)]
    missing = [name for name in names if installed(name) is None]
    if missing:
        raise SystemExit(f"{sys.executable} lacks {', '.join(missing)}; {INSTALL_HINT}")
    least, found = torch.partition(">=")[2], installed("torch") or ""
    if numbers(found) < numbers(least):
        raise SystemExit(
            f"{sys.executable} has torch {found}, expected {least} or newer; {INSTALL_HINT}"
        )


def version_of(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> list[int]:
    """The first two numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def interrupt(number: int, frame: object) -> None:
    """End as by Ctrl-C, so that the piece that runs is ended and what it saw is kept."""
    raise KeyboardInterrupt


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    listed = "\n".join(f"  {name:18s} {limit:4.0f} s" for name, limit in LIMIT_SECONDS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"The pieces and their limits:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--only", nargs="+", choices=LIMIT_SECONDS, metavar="PIECE", help="these alone"
    )
    parser.add_argument("--again", action="store_true", help="measure what is known anew")
    parser.add_argument("--quick", action="store_true", help="a dry run, which is no evidence")
    parser.add_argument("--output", type=Path, help=f"folder (default: {RESULTS.name}/)")
    parser.add_argument(
        "--minutes", type=float, default=TOTAL_MINUTES, help="for all pieces together"
    )
    parser.add_argument("--commit", help="what is measured, where git cannot say it")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is not known; 1 where a piece did not come to its end."""
    arguments = parse(words)
    check_software(version_of)
    facts = device_of(arguments.device)
    head = head_of(facts, arguments)
    output = arguments.output or RESULTS
    if "no_evidence" in head and arguments.output is None:
        raise SystemExit(
            f"this is {head['no_evidence']}: give --output FOLDER, results/ is evidence"
        )
    check_output(output)
    left_out = FULL_PIECES if arguments.quick else QUICK_PIECES
    pieces = arguments.only or [name for name in LIMIT_SECONDS if name not in left_out]
    print(f"{head['device']}, commit {head['commit']}, to {output}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a shell's "&" ignores SIGINT
        signal.signal(number, interrupt)
    failures, interrupted = measure(pieces, arguments, facts, head, output)
    for failure in failures:
        print(failure, file=sys.stderr)
    if failures:
        print(f"what was measured is in {output}; the same command goes on", file=sys.stderr)
    return 130 if interrupted else 1 if failures else 0


def measure(
    pieces: Sequence[str],
    arguments: argparse.Namespace,
    facts: DeviceFacts,
    head: Mapping[str, Any],
    output: Path,
) -> tuple[list[str], bool]:
    """Measure one piece after another; what failed, and whether it was interrupted."""
    began, failures, interrupted = time.monotonic(), [], False
    for piece in pieces:
        folders = () if arguments.again else (output, RESULTS)
        before = known(piece, head, folders)
        if before is not None:
            print(f"{piece:18s} is known: {before.name}", flush=True)
            continue
        left = 60 * arguments.minutes - (time.monotonic() - began)
        if interrupted or left < SHORTEST_SECONDS:
            over = f"the {arguments.minutes:g} minutes are over"
            failures.append(f"{piece}: not begun, {'interrupted' if interrupted else over}")
            continue
        since = time.monotonic()
        try:
            order = Order(
                piece,
                arguments.quick,
                min(LIMIT_SECONDS[piece], left),
                path_of(piece, head, output),
                head,
                begun(piece, head, folders) if piece.startswith(RESUMED) else (),
            )
            ended = run_piece(order, facts)
            path = write(piece, ended, head, output)
        except OSError as error:  # no room for temporary files, or for the result
            failures.append(f"{piece}: {error}")
            continue
        except KeyboardInterrupt:
            interrupted = True
            failures.append(f"{piece}: interrupted")
            continue
        interrupted = ended.interrupted
        print(f"{piece:18s} {time.monotonic() - since:4.0f} s  {path.name}", flush=True)
        failures += [f"{piece}: {ended.failed}"] if ended.failed else []
    return failures, interrupted


if __name__ == "__main__":
    raise SystemExit(main())
