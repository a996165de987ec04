"""The channel between the tuner and a worker: whole messages, whatever else is on the wire."""

from __future__ import annotations

import random
import socket
import struct
import threading
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.workers.channel import MAX_MESSAGE_BYTES, TOKEN_BYTES, Channel, ChannelClosed

TOKEN = bytes(range(TOKEN_BYTES))

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
messages = st.dictionaries(st.text(), plain, max_size=5).filter(
    lambda m: all(v not in (float("inf"), float("-inf")) for v in flat(m))
)


def flat(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for item in value.values():
            yield from flat(item)
    elif isinstance(value, list):
        for item in value:
            yield from flat(item)
    elif isinstance(value, float):
        yield value


def ends() -> tuple[Channel, Channel, socket.socket, socket.socket]:
    left, right = socket.socketpair()
    return Channel(left, TOKEN), Channel(right, TOKEN), left, right


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel, socket.socket, socket.socket]]:
    made = ends()
    yield made
    for each in made[2:]:
        each.close()


@given(messages)
def test_what_is_sent_arrives(message: dict[str, object]) -> None:
    a, b, left, right = ends()
    with left, right:
        a.send(message)
        assert b.receive(5) == message


@given(st.lists(st.binary(max_size=60) | st.just(TOKEN) | st.just(TOKEN[:7]), max_size=6))
def test_noise_between_frames_is_dropped(noise: list[bytes]) -> None:
    a, b, left, right = ends()
    with left, right:
        for number, each in enumerate(noise):
            # Noise that looks like the start of a frame claims a length too large to be one.
            left.sendall(each + (b"\xff" * 8 if TOKEN in each else b""))
            a.send({"number": number})
        for number in range(len(noise)):
            assert b.receive(5) == {"number": number}


def test_a_frame_with_a_wrong_checksum_is_no_message(pair) -> None:
    a, b, left, _ = pair
    data = b'{"call":"nothing"}'
    left.sendall(TOKEN + struct.pack("!II", len(data), zlib.crc32(data) ^ 1) + data)
    a.send({"good": True})
    assert b.receive(5) == {"good": True}


def test_json_that_is_no_mapping_is_no_message(pair) -> None:
    a, b, left, _ = pair
    for data in (b"[1,2]", b"not json", b"null"):
        left.sendall(TOKEN + struct.pack("!II", len(data), zlib.crc32(data)) + data)
    a.send({"good": True})
    assert b.receive(5) == {"good": True}


def test_messages_arrive_in_any_pieces(pair) -> None:
    _, b, left, _ = pair
    rng = random.Random(3)
    sent = [{"n": n, "text": "x" * rng.randrange(2000)} for n in range(50)]
    wire = bytearray()

    class Collects:
        def settimeout(self, seconds: float | None) -> None: ...

        def sendall(self, data: bytes) -> None:
            wire.extend(data)

    collecting = Channel(Collects(), TOKEN)  # type: ignore[arg-type]
    for message in sent:
        collecting.send(message)

    def dribble() -> None:
        at = 0
        while at < len(wire):
            size = rng.randrange(1, 3000)
            left.sendall(wire[at : at + size])
            at += size

    sender = threading.Thread(target=dribble)
    sender.start()
    assert [b.receive(10) for _ in sent] == sent
    sender.join()


def test_time_is_up_once_however_much_noise_arrives(pair) -> None:
    _, b, left, _ = pair
    over, made = threading.Event(), []

    def make_noise() -> None:
        while len(made) < 1000 and not over.wait(0.02):
            left.sendall(b"noise")
            made.append(1)

    noisy = threading.Thread(target=make_noise)
    noisy.start()
    with pytest.raises(TimeoutError):
        b.receive(0.3)
    over.set()
    noisy.join()
    assert 0 < len(made) < 1000, "it went on until the noise ended"


def test_a_message_that_arrived_counts_after_the_deadline(pair) -> None:
    """A tuner that was stopped and goes on must not take its worker for hung."""
    a, b, _, _ = pair
    a.send({"progress": ["steps", 1]})
    assert b.receive(0.0) == {"progress": ["steps", 1]}


def test_an_end_that_closed_is_said(pair) -> None:
    a, b, _, _ = pair
    a.close()
    with pytest.raises(ChannelClosed):
        b.receive(5)
    with pytest.raises(ChannelClosed):
        b.send({"anybody": "there"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_without_a_name_in_json_is_refused_before_it_is_sent(pair, value: float) -> None:
    a, b, _, _ = pair
    with pytest.raises(ValueError, match="JSON"):
        a.send({"value": value})
    a.send({"good": True})
    assert b.receive(5) == {"good": True}


def test_a_message_beyond_any_size_is_refused(pair) -> None:
    with pytest.raises(ValueError, match="larger than"):
        pair[0].send({"text": "x" * MAX_MESSAGE_BYTES})
