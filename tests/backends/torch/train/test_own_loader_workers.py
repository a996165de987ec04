"""Loaders that keep their workers: each stream has its own, and the loader stays usable."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from autoprec.backends.protocol import Task
from autoprec.backends.torch.trace.tracer import batch_stream
from autoprec.backends.torch.train.task_runner import batches

pytestmark = pytest.mark.torch

ROWS = TensorDataset(torch.arange(32.0).reshape(16, 2), torch.arange(16.0))
KEPT = {"num_workers": 1, "persistent_workers": True}


class Noisy(IterableDataset[Any]):
    """Rows that differ from pass to pass, for each worker its own."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for row in range(4):
            assert info is not None
            yield torch.randn(2) + 100 * info.id, torch.tensor(float(row))


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(ROWS, **{"batch_size": 4, "shuffle": True, **KEPT, **settings})


def task(build_data: Callable[[int], Any]) -> Task:
    return Task(
        name="task.py",
        build_model=lambda: nn.Linear(2, 1),
        build_data=build_data,
        loss_fn=nn.functional.mse_loss,
    )


def streams(build_data: Callable[[int], Any], count: int = 10) -> list[list[torch.Tensor]]:
    """What two streams of other seeds give, which take turns."""
    both = [batch_stream(task(build_data), 4, seed) for seed in (0, 1)]
    found: list[list[torch.Tensor]] = [[], []]
    for index in range(count):
        for seed in (0, 1):
            found[seed].append(both[seed].batch(index)[0])
    assert all(each.reproducible for each in both)
    for each in both:
        each.close()
    return found


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2, "prefetch_factor": 4}])
def test_one_loader_for_every_call_gives_what_a_new_one_gives(settings: dict[str, Any]) -> None:
    shared = loader(**settings)
    for anew, again in zip(
        streams(lambda size: loader(**settings)), streams(lambda size: shared), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(anew, again, strict=True))
    assert multiprocessing.active_children() == []


def test_a_data_set_without_an_end_of_its_own_is_shared_too() -> None:
    shared = DataLoader(Noisy(), batch_size=2, **{**KEPT, "num_workers": 2})
    first, second = streams(lambda size: shared)
    assert not torch.equal(first[0], first[4])  # the next pass draws on
    assert not torch.equal(first[0], second[0])


def test_the_users_own_pass_goes_on_meanwhile() -> None:
    shared = loader(shuffle=False)
    passing = iter(shared)
    assert next(passing)[1].tolist() == [0, 1, 2, 3]
    assert len(list(batches(task(lambda size: shared), 4, seed=0))) == 4
    assert next(passing)[1].tolist() == [4, 5, 6, 7]
    assert len(list(shared)) == 4


class Wrapped(DataLoader[Any]):
    """Begins a pass where the first batch is asked for, as trainers' loaders do."""

    def __iter__(self) -> Any:
        for inputs, targets in super().__iter__():
            yield inputs + 1, targets


def test_a_loader_of_a_class_of_its_own_is_shared_too() -> None:
    shared = Wrapped(ROWS, batch_size=4, **KEPT)
    first, second = streams(lambda size: shared)
    assert first[0].tolist() == second[0].tolist() == (ROWS.tensors[0][:4] + 1).tolist()
    assert multiprocessing.active_children() == []


def over(shared: DataLoader[Any]) -> Callable[[int], Any]:
    def build_data(batch_size: int) -> Iterator[Any]:
        yield from shared

    return build_data


@pytest.mark.parametrize("made", [over, lambda shared: lambda size: iter(shared)])
def test_a_pass_over_a_kept_loader_leaves_it_usable(made: Callable[..., Any]) -> None:
    shared = loader()
    for _ in range(2):
        stream = batches(task(made(shared)), 4, seed=0, repeat=True)
        assert all(len(next(stream)[0]) == 4 for _ in range(6))
        stream.close()
    assert len(list(shared)) == 4
