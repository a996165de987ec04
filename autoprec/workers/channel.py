"""Frames and messages between the tuner and a worker: JSON behind a header, over a socket.

The socket is a file descriptor of its own, so what the user's code prints, reads or closes does not
touch it. Should that code write on every descriptor it finds, a frame is still found again: it
begins with the worker's own token and carries a checksum, and what lies between frames is dropped.
Nothing is pickled.
"""

from __future__ import annotations

import json
import socket
import struct
import time
import zlib
from typing import Any

_HEADER = struct.Struct("!II")
MAX_MESSAGE_BYTES = 64 * 2**20
TOKEN_BYTES = 16


class ChannelClosed(Exception):
    """The other side has closed the channel."""


class Channel:
    """One end of the conversation between the tuner and a worker."""

    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self._socket, self._token = connection, token
        self._buffer = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; `ChannelClosed` if the other side closed, `ValueError` if not JSON."""
        data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
        header = self._token + _HEADER.pack(len(data), zlib.crc32(data))
        try:
            self._socket.settimeout(None)
            self._socket.sendall(header + data)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """Wait for one whole message, for at most `seconds`.

        Raises `ChannelClosed` when the other side has closed, `TimeoutError` when time is up.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while (message := self._next_message()) is None:
            self._receive_bytes(deadline)
        return message

    def _next_message(self) -> dict[str, Any] | None:
        """Return the first whole message in the buffer; drop what precedes it."""
        while True:
            start = self._buffer.find(self._token)
            if start < 0:
                del self._buffer[: max(0, len(self._buffer) - len(self._token) + 1)]
                return None
            del self._buffer[:start]
            body = len(self._token) + _HEADER.size
            if len(self._buffer) < body:
                return None
            length, checksum = _HEADER.unpack_from(self._buffer, len(self._token))
            if length <= MAX_MESSAGE_BYTES:
                if len(self._buffer) < body + length:
                    return None
                data = bytes(self._buffer[body : body + length])
                message = _decode(data) if zlib.crc32(data) == checksum else None
                if message is not None:
                    del self._buffer[: body + length]
                    return message
            del self._buffer[: len(self._token)]

    def _receive_bytes(self, deadline: float | None) -> None:
        """Add what arrives. After the deadline, what has arrived already still counts."""
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            self._socket.settimeout(left)
            part = self._socket.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            raise TimeoutError("no message arrived in time") from None
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not part:
            raise ChannelClosed("the other side closed the channel")
        self._buffer += part

    def fileno(self) -> int:
        """Return the descriptor of this end; -1 after `close`."""
        return self._socket.fileno()

    def shutdown(self) -> None:
        """Tell the other side that no more messages will follow."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _decode(data: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
