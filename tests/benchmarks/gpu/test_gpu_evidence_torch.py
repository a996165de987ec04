"""`make gpu-evidence` as a dry run on the CPU: its files, its resuming, and what fails in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autoprec.core.codec import from_plain
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.policies import propose
from autoprec.core.device.probe_result import DeviceReport, ProbeResult
from benchmarks.checkout import ROOT, child_environment
from benchmarks.gpu import evidence, pieces
from benchmarks.recordings.machine_replay import Recording
from benchmarks.report import gpu as tables

pytestmark = [pytest.mark.torch, pytest.mark.slow]

DRY = ("--device", "cpu", "--quick")


#: The command, whose pieces fork their workers, and take as long as a busy machine makes them.
FORKING = """
import sys
from benchmarks.gpu import evidence
evidence.PIECE_MODULE = "tests.benchmarks.gpu.forked_pieces"
evidence.LIMIT_SECONDS = dict.fromkeys(evidence.LIMIT_SECONDS, 600.0)
sys.exit(evidence.main())
"""


def run_evidence(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FORKING, *map(str, words)],
        env=child_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def rows_of(folder: Path, piece: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"gpu_{piece}-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_dry_run_writes_every_pieces_file_and_measures_none_twice(tmp_path: Path) -> None:
    pieces = ("device", "products", "tests", "overhead", "numerics", "tune-gpt2", "grid-tiny")
    words = (*DRY, "--output", tmp_path, "--minutes", 14, "--only", *pieces)
    done = run_evidence(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    for piece in pieces:
        for row in rows_of(tmp_path, piece):
            assert row["piece"] == piece
            assert row["no_evidence"] == "on the CPU, a dry run"
            assert {"date", "commit", "source", "device", "family", "torch"} <= row.keys()
            assert "failed_piece" not in row

    (recording,) = tmp_path.glob("recording-*.json")
    assert not from_plain(Recording, json.loads(recording.read_text())).synthetic
    assert any(row.get("measured_gflops") for row in rows_of(tmp_path, "products"))
    judged = [row for row in rows_of(tmp_path, "numerics") if "verdict" in row]
    assert [row["policy"] for row in judged] == ["bfloat16", "float16"]
    both = ["mixed_bfloat16", "mixed_float16"]
    assert [row["policy"] for row in rows_of(tmp_path, "overhead")] == ["float32", *both]
    grid = rows_of(tmp_path, "grid-tiny")
    assert [row["recipe"]["policy"] for row in grid] == ["float32", *both]
    assert all(row["over_float32"]["ratio"] > 0 for row in grid)
    assert grid[2]["recipe"]["loss_scale"]["floor"] > 1  # tuned, not the framework's
    assert rows_of(tmp_path, "tune-gpt2")[0]["trials"] >= 1

    before = times(tmp_path)
    again = run_evidence(*words)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("is known") == len(pieces)
    assert times(tmp_path) == before


#: One piece fails, one takes long, and one says what the real one does.
ENDING_PIECE = """
import os, shutil, sys, time
piece, rows = sys.argv[1:3]
if piece == "no-such-piece":
    sys.exit(2)
if piece == "products":
    time.sleep(60)
shutil.copy(os.environ["ROWS"], rows)
"""


def test_a_piece_that_fails_or_takes_too_long_stops_no_other(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (told,) = pieces.device(pieces.Setting("cpu", True))
    (tmp_path / "rows.jsonl").write_text(json.dumps(told) + "\n")
    (tmp_path / "ending_piece.py").write_text(ENDING_PIECE)
    monkeypatch.setattr(evidence, "PIECE_MODULE", "ending_piece")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.jsonl"))
    limits = {"no-such-piece": 30.0, "products": 0.1, "device": 60.0}
    monkeypatch.setattr(evidence, "LIMIT_SECONDS", limits)
    output = tmp_path / "output"
    words = [*DRY, "--output", str(output)]
    assert evidence.main(words) == 1
    said = capsys.readouterr().err
    assert "no-such-piece: ended with code 2" in said
    assert "products: ran out of its 0.1 s" in said
    assert "device:" not in said
    assert rows_of(output, "no-such-piece")[0]["failed_piece"].startswith("ended with code 2")
    assert "facts" in rows_of(output, "device")[0]

    assert evidence.main(words) == 1  # what failed is measured anew, the rest is known
    shown = capsys.readouterr()
    assert shown.out.count("is known") == 1
    assert "no-such-piece: ended with code 2" in shown.err
    before = times(output)
    assert evidence.main([*words, "--only", "device", "--again"]) == 0
    changed = {name for name, time in times(output).items() if before[name] != time}
    assert len(changed) == 2  # the rows and the recording


SLOW_PIECE = """
import os, sys, time
with open(sys.argv[2], "w", buffering=1) as file:
    file.write('{"seen": 1}\\n{"cut o')
    open(os.environ["SEEN"], "w").close()
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_saw_and_says_how_to_go_on(
    tmp_path: Path, number: int
) -> None:
    """The piece shows a row and goes on, as on a machine that is taken back."""
    program = tmp_path / "evidence"
    program.mkdir()
    (program / "slow_piece.py").write_text(SLOW_PIECE)
    script = (
        "import sys\n"
        "from benchmarks.gpu import evidence\n"
        "evidence.PIECE_MODULE = 'slow_piece'\n"
        "sys.exit(evidence.main(sys.argv[1:]))"
    )
    output, seen = tmp_path / "output", tmp_path / "seen"
    path = os.pathsep.join([str(ROOT), str(program)])
    child = subprocess.Popen(
        [sys.executable, "-c", script, *DRY, "--output", output, "--only", "device", "products"],
        env={**os.environ, "PYTHONPATH": path, "SEEN": str(seen)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while child.poll() is None and not seen.exists():
        time.sleep(0.05)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "device: interrupted" in said
    assert "products: not begun, interrupted" in said
    assert f"what was measured is in {output}; the same command goes on" in said
    assert "Traceback" not in said
    (row,) = rows_of(output, "device")
    assert (row["seen"], row["failed_piece"].split(":")[0]) == (1, "interrupted")


def test_an_interrupt_while_a_piece_starts_counts_when_it_has_started() -> None:
    put_off = evidence.defer_interrupts
    before = signal.getsignal(signal.SIGTERM)
    done = []

    def start() -> None:
        with put_off():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("started")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["started"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_missing_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: Any
) -> None:
    file = tmp_path / "a-file"
    file.touch()
    with pytest.raises(SystemExit, match=r"nothing can be written to .*give --output FOLDER"):
        evidence.main([*DRY, "--output", str(file / "below")])
    with pytest.raises(SystemExit, match="no device to measure: 'v100' is not here"):
        evidence.main(["--device", "v100"])
    for without in ("torch", "platformdirs"):
        with pytest.raises(SystemExit, match=f"lacks {without}; nothing is installed here"):
            evidence.check_software(
                lambda name, without=without: None if name == without else "9.9"
            )
    with pytest.raises(SystemExit, match=r"has torch 2\.5\.1\+cu124, expected 2\.6 or newer"):
        evidence.check_software(lambda name: "2.5.1+cu124")
    evidence.check_software(lambda name: "2.13.0")
    bare = tmp_path / "without-anything"
    (bare / "autoprec").mkdir(parents=True)
    (bare / "autoprec" / "__init__.py").write_text("import no_such_package")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(bare)!r}); import benchmarks.gpu.evidence",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{sys.executable} lacks no_such_package; nothing is installed here" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_result_that_cannot_be_written_stops_no_other(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(evidence, "run_piece", lambda *_: evidence.PieceResult(({"seen": 1},)))
    kept = evidence.write

    def full(piece: str, *rest: Any) -> Path:
        if piece == "device":
            raise OSError(28, "No space left on device")
        return kept(piece, *rest)

    monkeypatch.setattr(evidence, "write", full)
    assert evidence.main([*DRY, "--output", str(tmp_path), "--only", "device", "products"]) == 1
    assert "device: [Errno 28] No space left on device" in capsys.readouterr().err
    assert rows_of(tmp_path, "products")[0]["seen"] == 1


def test_a_piece_is_shown_the_one_device_that_is_measured(tmp_path: Path, monkeypatch: Any) -> None:
    """On a host with several GPUs "cuda" in another process would be another one."""
    shows = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[2], 'w'))"
    (tmp_path / "shows_environment.py").write_text(shows)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(evidence, "PIECE_MODULE", "shows_environment")
    seen = Observation(DeviceKind.CUDA, index=1, uuid="GPU-2")
    order = evidence.Order("device", True, 30, tmp_path / "rows")
    ended = evidence.run_piece(order, DeviceFacts(seen, "f", "t", {}))
    assert ended.rows[0]["CUDA_VISIBLE_DEVICES"] == "GPU-2"
    facts = DeviceFacts(Observation(DeviceKind.ROCM), "f", "t", {})
    found = ProbeResult((DeviceReport(facts, propose(facts)),))
    monkeypatch.setattr(pieces, "probe", lambda device: found)
    assert pieces.Setting("rocm").where == "cuda"


@pytest.mark.release
def test_the_gpu_tests_are_found_without_pytests_plugin_for_timeouts(monkeypatch: Any) -> None:
    """A lent machine has pytest at best."""
    monkeypatch.setattr(pieces, "find_spec", lambda name: None if "timeout" in name else name)
    run, given = subprocess.run, []

    def without(command: Any, **settings: Any) -> Any:
        file = "tests/backends/torch/test_gpu_torch.py"  # alone, which is quicker
        words = [file if word == "tests/backends/torch" else word for word in command]
        given.extend([*words, "-p", "no:timeout"])
        return run(given, **settings)

    monkeypatch.setattr(pieces.subprocess, "run", without)
    assert list(pieces.tests(pieces.Setting("cpu", True)))[-1]["code"] == 0
    monkeypatch.setattr(pieces, "find_spec", lambda name: None)
    with pytest.raises(pieces.PieceFailed, match="pytest is not installed for "):
        list(pieces.tests(pieces.Setting("cpu", True)))


def test_time_that_is_over_leaves_pieces_for_the_next_run(tmp_path: Path, capsys: Any) -> None:
    words = [*DRY, "--output", str(tmp_path), "--minutes", "0.01", "--only", "device"]
    assert evidence.main(words) == 1
    assert "device: not begun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_another_commit_program_or_device_is_measured_anew(tmp_path: Path) -> None:
    head = {"date": "2026-01-01", "commit": "a", "device": "A GPU", "source": "b", "torch": "2"}
    path = evidence.write("device", evidence.PieceResult(), head, tmp_path)
    assert evidence.known("device", {**head, "date": "2026-02-02"}, [tmp_path]) == path
    for name in ("commit", "source", "torch", "device"):
        assert evidence.known("device", {**head, name: "other"}, [tmp_path]) is None
    assert evidence.known("device", {**head, "no_evidence": "a dry run"}, [tmp_path]) is None


def test_what_is_no_evidence_is_kept_out_of_the_results(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(SystemExit, match="on the CPU, a dry run: give --output FOLDER"):
        evidence.main(DRY)
    monkeypatch.setenv("AUTOPREC_REHEARSAL", "1")
    with pytest.raises(SystemExit, match="a rehearsal, on the CPU: give --output FOLDER"):
        evidence.main(["--device", "cpu"])
    head = {"date": "2026-01-01", "commit": "a", "device": "CPU", "no_evidence": "a rehearsal"}
    evidence.write("device", evidence.PieceResult(), head, tmp_path)
    with pytest.raises(SystemExit, match=r"gpu_device-.*: a rehearsal given"):
        tables.read(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"device": "A GPU", "piece": "de', '{"piece": "device"}', "1", ""]
)
def test_a_file_that_is_cut_off_or_lacks_keys_is_told_by_its_name(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "gpu_device-2026-01-01-a-gpu.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=r"gpu_device-2026-01-01-a-gpu\.jsonl: .*measure it again"):
        tables.read(tmp_path)
    head = {"date": "2026-01-01", "commit": "a", "device": "A GPU"}
    assert evidence.known("device", head, [tmp_path]) is None


def test_the_report_shows_what_is_there_and_says_what_is_not(tmp_path: Path) -> None:
    assert "| any | not measured" in "\n".join(tables.section(tables.read(tmp_path)))
    head = {"date": "2026-01-01", "commit": "abc", "device": "Made Up GPU", "torch": "2"}
    ratio = {"ratio": 2.0, "low": 1.9, "high": 2.1}
    plain = {"policy": "mixed_bfloat16", "compile": False, "batch_size": 8}
    grid = [
        {"task": "mlp", "recipe": plain, "over_float32": ratio},
        {"task": "mlp", "recipe": {**plain, "compile": True}, "failed": "no compiler"},
    ]
    evidenced = {"throughput": ratio, "speedup": {**ratio, "ratio": 1.95}}
    tuned = [{"task": "mlp", "recipe": plain, "evidence": evidenced}]
    judged = {"policy": "float16", "verdict": "equal", "truth": "broken"}
    here = {**judged, "policy": "bfloat16", "truth_here": "healthy"}
    evidence.write("grid-mlp", evidence.PieceResult(tuple(grid)), head, tmp_path)
    evidence.write("tune-mlp", evidence.PieceResult(tuple(tuned)), head, tmp_path)
    evidence.write(
        "numerics", evidence.PieceResult((judged, here), "ran out of its 9 s"), head, tmp_path
    )
    shown = "\n".join(tables.section(tables.read(tmp_path)))
    assert "not measured" not in shown
    row = "| Made Up GPU | mlp | - | - | 2.00x, compiled failed | - | mixed_bfloat16, batch 8 |"
    assert f"{row} 2.00x (1.90-2.10) | 1.95x (1.90-2.10) |" in shown
    assert "float16: 0 of 1 broken caught" in shown
    assert "bfloat16: 0 of 0 broken caught; bfloat16: 0 of 1 healthy flagged" in shown
    assert "failed: ran out of its 9 s" in shown
