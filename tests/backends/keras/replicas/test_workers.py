"""MultiWorkerMirroredStrategy over two processes: a custom loop trains, `fit` is refused."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fork_server import ForkServer

HERE = Path(__file__).parent


def run(forked: ForkServer, *arguments: int) -> dict[str, Any]:
    """What on_workers prints, with as many threads as TensorFlow wants: replicas wait."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_NUM_")}
    done = forked.run(HERE / "on_workers.py", *arguments, seconds=200, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.fixture(scope="module")
def trained(forked: ForkServer) -> dict[str, dict[str, Any]]:
    ports = free_ports(2)
    assert forked.pid  # it runs before three threads ask for it
    words = {"one": (0, *ports), "two": (1, *ports), "alone": ()}
    with ThreadPoolExecutor(3) as pool:
        running = {name: pool.submit(run, forked, *given) for name, given in words.items()}
        return {name: each.result() for name, each in running.items()}


def difference(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> float:
    pairs = zip(ours[name]["weights"], theirs[name]["weights"], strict=True)
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs)


@pytest.mark.scale
@pytest.mark.parametrize("name", ["plain", "accumulating"])
def test_two_processes_train_like_one(trained: dict[str, Any], name: str) -> None:
    assert difference(trained["one"], trained["alone"], name) <= 1e-5
    assert difference(trained["one"], trained["two"], name) == 0
    assert trained["one"][name]["counts"][0] == trained["alone"][name]["counts"][0]


@pytest.mark.scale
def test_what_is_left_of_an_accumulation_is_flushed_in_both(trained: dict[str, Any]) -> None:
    for worker in ("one", "two"):
        assert trained[worker]["accumulating"]["counts"] == [3, 0, 1.0, True]


@pytest.mark.scale
def test_an_overflow_in_one_process_skips_the_step_in_both(trained: dict[str, Any]) -> None:
    for worker in ("one", "two"):
        assert trained[worker]["overflowing"]["counts"] == [4, 1, 32.0, False]
    assert difference(trained["one"], trained["two"], "overflowing") == 0


@pytest.mark.scale
def test_fit_says_that_keras_cannot(trained: dict[str, Any]) -> None:
    for worker in ("one", "two"):
        assert "Keras 3 on TensorFlow does not support that" in trained[worker]["fit"]
    assert "fit" not in trained["alone"]
