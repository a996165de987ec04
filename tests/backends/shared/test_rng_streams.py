"""What one stream draws does not change another, and what is preserved goes on as before."""

from __future__ import annotations

import contextlib
import pickle
import random
from typing import Any

import numpy as np
import pytest

from autoprec.backends.shared.rng_streams import (
    HostGenerators,
    RandomStream,
    generators_preserved,
    is_host_generator,
    seed_host_generator,
    state_of_host_generator,
)

HOST = HostGenerators()


def draw() -> tuple[float, float]:
    return random.random(), float(np.random.random())


def test_a_stream_goes_on_whatever_is_drawn_outside_and_the_other_way_round():
    HOST.seed(1)
    alone = [draw() for _ in range(4)]
    HOST.seed(2)
    outside_alone = [draw() for _ in range(4)]
    HOST.seed(1)
    stream = RandomStream(HOST)
    HOST.seed(2)
    inside, outside = [], []
    for _ in range(4):
        with stream.swapped():
            inside.append(draw())
        outside.append(draw())
    assert inside == alone
    assert outside == outside_alone


def test_the_outer_stream_goes_on_after_an_error_inside():
    HOST.seed(3)
    expected = draw()
    HOST.seed(3)
    stream = RandomStream(HOST)
    with contextlib.suppress(RuntimeError), stream.swapped():
        draw()
        raise RuntimeError
    assert draw() == expected


def test_preserved_generators_are_where_they_were():
    HOST.seed(4)
    expected = draw()
    HOST.seed(4)
    with generators_preserved(HOST):
        draw()
    assert draw() == expected


def test_large_seeds_are_numpy_s_too():
    HOST.seed(2**40 + 1)
    first = draw()
    HOST.seed(2**40 + 1)
    assert draw() == first


@pytest.mark.parametrize(
    "made",
    [
        random.Random,
        np.random.default_rng,
        np.random.RandomState,
        lambda: np.random.Generator(np.random.MT19937()),
    ],
)
def test_a_generator_of_ones_own_is_seeded_and_tells_whether_it_was_drawn_from(made: Any) -> None:
    generator = made()
    draw = generator.uniform
    assert is_host_generator(generator)
    drawn, states = [], []
    for seed in (2**40, 7, 2**40):
        seed_host_generator(generator, seed)
        states.append(pickle.dumps(state_of_host_generator(generator)))
        drawn.append(draw(0.0, 1.0))
    assert drawn[0] == drawn[2] != drawn[1]
    assert states[0] == states[2] != pickle.dumps(state_of_host_generator(generator))


def test_what_is_no_generator_is_told() -> None:
    assert not any(map(is_host_generator, (random, np.random, random.random, None, 3)))
