"""What a rival's search is given of a task."""

from __future__ import annotations

import pytest

from benchmarks.peers import searches


@pytest.mark.torch
def test_a_rival_gets_the_tasks_own_optimizer_with_its_weight_decay() -> None:
    import torch

    task = searches.load("resnet")
    made = task.build_optimizer(task.build_model())
    weight = torch.nn.Parameter(torch.ones(3))
    found = searches.optimizer_like(made)([weight])
    assert type(found) is type(made)
    assert found.defaults == made.defaults
    assert found.defaults["weight_decay"] == 1e-4
    two = torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [], "lr": 0.2}])
    with pytest.raises(ValueError, match="settings of their own"):
        searches.optimizer_like(two)
