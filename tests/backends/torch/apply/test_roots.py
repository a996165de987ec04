"""The module at which a recipe's paths start, inside what a trainer holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.backends.torch.apply.roots import find_root, recipe_paths
from autoprec.core.recipe import Alignment, Recipe
from autoprec.errors import UsageError

pytestmark = pytest.mark.torch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)


class Holder(nn.Module):
    """As a LightningModule: a model, and a metric without parameters."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = Net() if net is None else net
        self.metric = nn.Identity()


class Adapted(nn.Module):
    """As PEFT's models: the model is at `base_model.model`."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = Net()


def test_the_paths_of_a_recipe_are_those_of_parts() -> None:
    recipe = Recipe(float32_modules=("", "a", "b"), alignment=Alignment(8, ("b", "c")))
    assert recipe_paths(recipe) == ("a", "b", "c")


def test_the_model_itself_comes_first() -> None:
    net = Net()
    assert find_root(net, ["head", "body.0"]) is net
    assert find_root(net, []) is net


def test_the_only_part_that_has_all_paths_is_the_root() -> None:
    holder = Holder()
    assert find_root(holder, ["head"]) is holder.net
    adapted = Adapted()
    assert find_root(adapted, ["head", "body.1"]) is adapted.base_model.model
    outside = Holder(adapted)
    assert find_root(outside, ["head"]) is adapted.base_model.model


def test_compiled_wrappers_are_looked_into() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    assert find_root(compiled, ["head"]) is net
    assert find_root(Holder(compiled), ["head"]) is net


def test_without_paths_what_holds_a_model_gives_the_only_child_with_parameters() -> None:
    holder = Holder()
    assert find_root(holder, [], holds=True) is holder.net
    assert find_root(holder, []) is holder
    holder.other = nn.Linear(2, 2)
    assert find_root(holder, [], holds=True) is holder


def test_a_part_that_is_named_is_the_root() -> None:
    holder = Holder()
    assert find_root(holder, ["0"], part="net.body") is holder.net.body
    with pytest.raises(UsageError, match=r"part='nets' given.*expected one of 'net', 'metric'"):
        find_root(holder, [], part="nets")
    with pytest.raises(UsageError, match="part='net' has no module 'tail'"):
        find_root(holder, ["tail"], part="net")


def test_several_parts_that_fit_are_named() -> None:
    holder = Holder()
    holder.teacher = Net()
    with pytest.raises(UsageError, match=r"several parts of Holder: 'net', 'teacher'.*part='net'"):
        find_root(holder, ["head"])


def test_a_path_that_is_nowhere_is_named() -> None:
    with pytest.raises(UsageError, match="names 'tail', and neither Holder nor a part"):
        find_root(Holder(), ["tail"])
