"""The files of pieces' rows: how they are named, read and completed, and what is known already.

A piece's process writes its rows itself, each as soon as it is known, with a head that says what
was measured and a mark that the piece is not done. `write` puts them in order when it has ended. So
whatever ends a run, what it measured is in a file that says so.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoprec.yaml_files import write_text

#: Why a piece's rows are no whole result, by the key of that name.
FAILED = "failed_piece"
#: What stands there while the piece runs, and for good where its run was ended with it.
NOT_DONE = "ended before it was done"


@dataclass(frozen=True)
class PieceResult:
    """How a piece ended: what it saw, and what failed, if anything did."""

    rows: tuple[dict[str, Any], ...] = ()
    failed: str = ""
    interrupted: bool = False


def slug(name: str) -> str:
    """A device's name as a part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def path_of(piece: str, head: Mapping[str, Any], output: Path) -> Path:
    """Where a piece's rows of today are."""
    return output / f"gpu_{piece}-{head['date']}-{slug(str(head['device']))}.jsonl"


def row_text(piece: str, head: Mapping[str, Any], row: Mapping[str, Any], failed: str) -> str:
    """A line of a file."""
    return json.dumps({**head, "piece": piece, **({FAILED: failed} if failed else {}), **row})


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; the last one may be cut off, where its writer was ended."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def bare_rows(path: Path, head: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The rows of a file without their head and marks; those that hold nothing else left out."""
    told = {*head, "piece", FAILED}
    bare = ({k: v for k, v in row.items() if k not in told} for row in read_rows(path))
    return tuple(row for row in bare if row)


def _same_program(
    piece: str, head: Mapping[str, Any], folders: Sequence[Path]
) -> Iterator[tuple[Path, bool]]:
    """Files of the same program, software and device, and whether each is a whole result."""
    same = head.keys() - {"date"}
    for folder in folders:
        for path in sorted(folder.glob(f"gpu_{piece}-*-{slug(head['device'])}.jsonl")):
            rows = list(read_rows(path))
            if rows and all(rows[0].get(key) == head[key] for key in same):
                yield path, not any(FAILED in row for row in rows)


def known(piece: str, head: Mapping[str, Any], folders: Sequence[Path]) -> Path | None:
    """A piece's whole result of the same program, software and device, if one is there."""
    return next((path for path, whole in _same_program(piece, head, folders) if whole), None)


def begun(
    piece: str, head: Mapping[str, Any], folders: Sequence[Path]
) -> tuple[dict[str, Any], ...]:
    """The most rows that a run of the same program left when it failed or was ended."""
    left = [
        bare_rows(path, head) for path, whole in _same_program(piece, head, folders) if not whole
    ]
    return max(left, key=len, default=())


def write(piece: str, ended: PieceResult, head: Mapping[str, Any], output: Path) -> Path:
    """Write a piece's lines; a machine's recording has a file of its own."""
    lines = []
    for row in ended.rows or ({},):
        recording = row.pop("recording", None)
        if recording is not None:
            text = json.dumps(recording, indent=1, ensure_ascii=False)
            write_text(output / f"recording-{slug(str(head['device']))}.json", f"{text}\n")
        lines.append(row_text(piece, head, row, ended.failed))
    path = path_of(piece, head, output)
    write_text(path, "\n".join(lines) + "\n")
    return path
