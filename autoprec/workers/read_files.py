"""Which files of the user's a script reads before it trains: what they hold says what it trains.

What counts is what Python opens for code of the user's: in the script's folder, in the one it runs
in, or named among its arguments. Left out are code, which has a digest of its own, folders whose
name begins with a dot, what the script wrote itself, and what autoprec reads, such as a profile.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import stat
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from autoprec.workers.task_source import TaskSource

#: Of a file that is larger, the beginning and the end count, and the size.
_WHOLE_BYTES = 2**20
#: After so many bytes, in the order of the names, only sizes count: these are data.
_MOST_BYTES = 64 * 2**20

_PACKAGE = __name__.partition(".")[0] + "."
_LEFT_OUT = ("site-packages", "__pycache__")


class ReadFiles:
    """Notes what is opened from `__enter__` to `end`."""

    def __init__(self, source: TaskSource) -> None:
        own = () if source.sent else (source.path.parent,)
        self._roots = tuple(dict.fromkeys(os.path.abspath(each) for each in (*own, Path.cwd())))
        words = (word.rpartition("=")[2] for word in source.arguments)
        self._named = {os.path.abspath(word) for word in words if word}
        self._read: set[str] = set()
        self._written: set[str] = set()
        self._open = builtins.open

    def __enter__(self) -> ReadFiles:
        original = self._open

        def noting_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            self._note(file, mode, sys._getframe(1))
            return original(file, mode, *args, **kwargs)

        # What the user's code raises there is told without this frame, as without the import's.
        code = noting_open.__code__.replace(co_filename="<frozen open>")
        noting_open.__code__ = code
        builtins.open = io.open = noting_open
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Note no more."""
        builtins.open = io.open = self._open

    def digest(self) -> str:
        """Hash (SHA-256) names and content of what was read; "" if nothing was."""
        found = {self._name(path): path for path in self._read - self._written}
        digest, left = hashlib.sha256(), _MOST_BYTES
        for name in sorted(found):
            try:
                seen = os.stat(found[name])
                if not stat.S_ISREG(seen.st_mode):
                    continue
                content = _ends_of(found[name], seen.st_size) if left > 0 else b""
            except OSError:  # it is gone already
                continue
            left -= len(content)
            digest.update(f"{name}\0{seen.st_size}\0".encode(errors="surrogateescape") + content)
        return digest.hexdigest() if found else ""

    def _note(self, file: Any, mode: Any, frame: FrameType | None) -> None:
        if not isinstance(file, str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(file))
        if isinstance(mode, str) and set(mode) & set("wax+"):
            self._written.add(path)
        elif self._counts(path) and self._is_opened_for_user(frame):
            self._read.add(path)

    def _counts(self, path: str) -> bool:
        if path in self._named:
            return True
        root = self._root_of(path)
        if root is None or path.endswith((".py", ".pyc", ".ipynb")):
            return False
        folders = path[len(root) :].split(os.sep)[:-1]
        return not any(each.startswith(".") or each in _LEFT_OUT for each in folders)

    def _is_opened_for_user(self, frame: FrameType | None) -> bool:
        """Say whose code the innermost is that is no library's: the user's, rather than ours."""
        while frame is not None:
            if f"{frame.f_globals.get('__name__', '')}.".startswith(_PACKAGE):
                return False
            file = os.path.abspath(frame.f_code.co_filename)
            if self._root_of(file) is not None and "site-packages" not in file:
                return True
            frame = frame.f_back
        return True

    def _root_of(self, path: str) -> str | None:
        return next((each for each in self._roots if path.startswith(each + os.sep)), None)

    def _name(self, path: str) -> str:
        root = self._root_of(path)
        return os.path.basename(path) if root is None else path[len(root) + 1 :]


def _ends_of(path: str, size: int) -> bytes:
    """Return a file's content; of a large one its two ends."""
    with open(path, "rb") as file:
        if size <= _WHOLE_BYTES:
            return file.read(_WHOLE_BYTES)
        first = file.read(_WHOLE_BYTES // 2)
        file.seek(-(_WHOLE_BYTES // 2), os.SEEK_END)
        return first + file.read()
