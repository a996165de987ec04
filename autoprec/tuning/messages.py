"""Frames and messages between the tuner and a worker: JSON behind a length, over a socket.

The socket is a file descriptor of its own: what the user's code prints, reads or closes does not
touch it. Nothing is pickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!I")
LARGEST = 64 * 2**20


class ChannelClosed(Exception):
    """The other side has gone."""


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; `ChannelClosed` if nobody is there."""
    data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    try:
        channel.sendall(_HEADER.pack(len(data)) + data)
    except OSError as error:
        raise ChannelClosed(str(error)) from error


def receive(channel: socket.socket) -> dict[str, Any]:
    """Wait for one whole message; `ChannelClosed` at the end, `TimeoutError` as the socket's."""
    (length,) = _HEADER.unpack(_exactly(channel, _HEADER.size))
    if length > LARGEST:
        raise ChannelClosed(f"a message of {length} bytes is more than any that is sent")
    message = json.loads(_exactly(channel, length))
    if not isinstance(message, dict):
        raise ChannelClosed("a message that is not a mapping")
    return message


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = channel.recv(count - len(parts))
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not part:
            raise ChannelClosed("the other side closed the channel")
        parts += part
    return bytes(parts)
