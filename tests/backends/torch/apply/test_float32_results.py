"""Whatever holds them, a model's 16-bit tensors leave it in float32; what keeps them is named."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import types
import warnings
from concurrent.futures import Future
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributions, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from autoprec.backends.torch.apply.float32_results import results_to_float32
from autoprec.errors import AutoprecWarning
from tests.backends.torch.operated import BFLOAT16, FLOAT16, apply

pytestmark = pytest.mark.torch

LOW, FULL = torch.bfloat16, torch.float32


class Returning(nn.Module):
    """Returns what `wrap` makes of its last product; keeps it, too."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4)
        self.wrap = wrap
        self.last: Any = None

    def forward(self, inputs: torch.Tensor) -> Any:
        self.last = self.wrap(self.linear(inputs))
        return self.last


class Plain:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.note = "kept"


class Slotted:
    __slots__ = ("__hidden", "logits", "never_set")

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.__hidden = [logits]

    def hidden(self) -> torch.Tensor:
        return self.__hidden[0]


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    inner: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    logits: torch.Tensor


class Named(NamedTuple):
    logits: torch.Tensor


class Attributes(dict):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class ReadOnly:
    """Its `__setattr__` refuses, and it cannot be copied as the copy module does."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.__dict__["logits"] = logits

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not copied")


def array(items: Any) -> Any:
    """Make an array of objects, of two dimensions or of none."""
    if not isinstance(items, list):
        made = np.empty(1, object)
        made[0] = items
        return made.reshape(())
    made = np.empty((2, 2), object)
    for index, each in enumerate(itertools.chain(*items)):
        made[divmod(index, 2)] = each
    return made


class Listed(list):
    logits: torch.Tensor


def listed(x: torch.Tensor) -> Listed:
    made = Listed([x])
    made.logits = x
    return made


HOLDERS: dict[str, tuple[Any, Any]] = {
    "namespace": (lambda x: types.SimpleNamespace(logits=x), lambda y: y.logits),
    "plain": (Plain, lambda y: y.logits),
    "slots": (Slotted, lambda y: y.hidden()),
    "frozen": (lambda x: Frozen(None, Plain(x)), lambda y: y.inner.logits),
    "frozen slots": (FrozenSlots, lambda y: y.logits),
    "named tuple": (lambda x: Named(Plain(x)), lambda y: y.logits.logits),
    "dict that is its attributes": (lambda x: Attributes(logits=x), lambda y: y.logits),
    "ordered": (lambda x: collections.OrderedDict(a=Plain(x)), lambda y: y["a"].logits),
    "default": (lambda x: collections.defaultdict(list, a=[Plain(x)]), lambda y: y["a"][0].logits),
    "user's dict": (lambda x: collections.UserDict(a=x), lambda y: y["a"]),
    "read-only mapping": (lambda x: types.MappingProxyType({"a": x}), lambda y: y["a"]),
    "deque": (lambda x: collections.deque([x, Plain(x)]), lambda y: y[1].logits),
    "set": (lambda x: frozenset([x]), lambda y: next(iter(y))),
    "read-only": (ReadOnly, lambda y: y.logits),
    "array": (lambda x: array([[1, x], [Plain(x), "a"]]), lambda y: y[1, 0].logits),
    "array in memory's order": (lambda x: array([[1, x], [x, 2]]).T, lambda y: y[0, 1]),
    "array without dimensions": (array, lambda y: y[()]),
    "list with attributes": (listed, lambda y: y.logits),
    "packed": (lambda x: Plain(pack_sequence([x])), lambda y: y.logits.data),
    "nested": (
        lambda x: Plain(torch.nested.as_nested_tensor([x, x], layout=torch.jagged)),
        lambda y: y.logits,
    ),
    "sparse": (lambda x: Plain(x.to_sparse()), lambda y: y.logits),
    "values and indices": (lambda x: [x.max(-1)], lambda y: y[0].values),
    "distribution of one's own": (
        lambda x: Plain(distributions.Normal(x, 1)),
        lambda y: y.logits.loc,
    ),
}


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", HOLDERS)
def test_outputs_are_float32_whatever_holds_them(name: str, recipe: Any) -> None:
    wrap, unwrap = HOLDERS[name]
    model = Returning(wrap)
    precision = apply(recipe, model)
    output = precision.forward(torch.ones(1, 2))
    assert unwrap(output).dtype is FULL
    assert type(output) is type(wrap(torch.ones(1, 4)))
    assert unwrap(output).requires_grad


@pytest.mark.parametrize("name", ["namespace", "plain", "slots", "frozen", "ordered"])
def test_what_the_model_keeps_stays_as_it_left_it(name: str) -> None:
    wrap, unwrap = HOLDERS[name]
    model = Returning(wrap)
    output = apply(BFLOAT16, model).forward(torch.ones(1, 2))
    assert output is not model.last
    assert unwrap(model.last).dtype is LOW


def test_what_holds_no_16_bit_tensor_is_returned_itself() -> None:
    kept = types.SimpleNamespace(mask=torch.ones(2), inner=[Plain(torch.ones(1))])
    model = Returning(lambda x: (kept, x))
    assert apply(BFLOAT16, model).forward(torch.ones(1, 2))[0] is kept


def test_references_to_one_object_stay_references_to_one() -> None:
    def wrap(x: torch.Tensor) -> Any:
        shared = Plain(x)
        return {"a": shared, "b": [shared, x], "c": (x, x)}

    output = apply(BFLOAT16, Returning(wrap)).forward(torch.ones(1, 2))
    assert output["a"] is output["b"][0]
    assert output["a"].logits is output["b"][1] is output["c"][0] is output["c"][1]


def test_objects_may_refer_to_each_other() -> None:
    def wrap(x: torch.Tensor) -> Any:
        first, second = Plain(x), types.SimpleNamespace(logits=x, many=[])
        first.other, second.other = second, first
        second.many += [second.many, (first,)]
        return first

    output = apply(BFLOAT16, Returning(wrap)).forward(torch.ones(1, 2))
    assert output.other.other is output
    assert output.other.many[0] is output.other.many
    assert output.other.many[1][0] is output
    assert output.logits.dtype is output.other.logits.dtype is FULL


def test_a_long_chain_of_objects_is_no_recursion() -> None:
    def wrap(x: torch.Tensor) -> Any:
        chain: list[Any] = []
        for _ in range(3000):
            chain.append(Plain(x))
            chain[-1].before = chain[-2] if len(chain) > 1 else None
        return chain[-1]

    output = apply(BFLOAT16, Returning(wrap)).forward(torch.ones(1, 2))
    assert output.before.before.logits.dtype is FULL


def test_a_module_in_the_output_is_not_copied() -> None:
    model = Returning(lambda x: types.SimpleNamespace(logits=x, model=model))
    output = apply(BFLOAT16, model).forward(torch.ones(1, 2))
    assert output.model is model
    assert output.logits.dtype is FULL


def closure(x: torch.Tensor) -> Any:
    return lambda: x


def asked(value: Any, method: str, x: Any) -> Any:
    getattr(value, method)(x)
    return value


def generated(x: torch.Tensor) -> Any:
    def items() -> Any:
        yield x

    return items()


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (closure, "function"),
        (generated, "generator"),
        (lambda x: Plain(closure(x)), "function"),
        (lambda x: lambda kept=x: kept, "function"),
        (lambda x: iter([x]), "list_iterator"),
        (lambda x: zip([x], "a", strict=True), "zip"),
        (lambda x: map(torch.relu, [x]), "map"),
        (lambda x: (each for each in [x]), "generator"),
        (lambda x: asked(Future(), "set_result", x), "concurrent.futures._base.Future"),
        (lambda x: asked(Queue(), "put", Plain(x)), "queue.Queue"),
        (lambda x: enumerate([x]), "enumerate"),
        (lambda x: itertools.chain([1], [Plain(x)]), "itertools.chain"),
        (itertools.repeat, "itertools.repeat"),
        (lambda x: {"a": x}.values(), "dict_values"),
        (lambda x: {"a": Plain(x)}.items(), "dict_items"),
    ],
)
def test_what_cannot_be_cast_is_named_once_with_the_way_out(wrap: Any, name: str) -> None:
    model = Returning(wrap)
    precision = apply(BFLOAT16, model)
    with pytest.warns(AutoprecWarning, match=rf"a {name} with a bfloat16 .*\.float\(\)") as said:
        precision.forward(torch.ones(1, 2))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precision.forward(torch.ones(1, 2))


def test_an_iterator_is_looked_at_without_being_used_up() -> None:
    output = apply(BFLOAT16, Returning(lambda x: iter([x.float(), 1]))).forward(torch.ones(1, 2))
    assert [type(each) for each in output] == [torch.Tensor, int]


def test_more_objects_than_are_looked_into_are_said() -> None:
    model = Returning(lambda x: [Plain(1) for _ in range(30_000)])
    precision = apply(BFLOAT16, model)
    with pytest.warns(AutoprecWarning, match="more than 20000 objects"):
        precision.forward(torch.ones(1, 2))


def test_the_arguments_of_a_loss_are_cast_whatever_holds_them() -> None:
    precision = apply(BFLOAT16, nn.Linear(2, 2))
    seen = []
    given = types.SimpleNamespace(logits=torch.ones(2, dtype=LOW))
    precision.compute_loss(lambda out: seen.append(out.logits.dtype), given)
    assert seen == [FULL]
    assert given.logits.dtype is LOW


class WithHead(nn.Module):
    """Computes its loss itself, from an object that its head returns."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Returning(Plain)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.head(inputs).logits.dtype
        return inputs.sum()


def test_an_island_is_given_float32_in_objects_too() -> None:
    model = WithHead()
    recipe = dataclasses.replace(BFLOAT16, float32_modules=("",))
    apply(recipe, model).forward(torch.ones(1, 2))
    assert model.seen is FULL


def test_an_object_that_a_module_changes_in_place_stays_the_callers() -> None:
    class Appends(nn.Module):
        def forward(self, inputs: torch.Tensor, state: Any) -> Any:
            state.seen = inputs.bfloat16()
            return inputs, state

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Appends()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            state = types.SimpleNamespace()
            self.same = self.inner(inputs, state)[1] is state
            return inputs

    model = Outer()
    apply(dataclasses.replace(BFLOAT16, float32_modules=("",)), model).forward(torch.ones(1, 2))
    assert model.same


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # what torch.compile itself reads
def test_what_is_compiled_returns_float32_too() -> None:
    torch._dynamo.reset()
    for wrap, unwrap in (HOLDERS["namespace"], (lambda x: {"a": (x, x)}, lambda y: y["a"][1])):
        model = Returning(wrap)
        precision = apply(dataclasses.replace(BFLOAT16, compile=True), model)
        for _ in range(2):
            assert unwrap(precision.forward(torch.ones(1, 2))).dtype is FULL


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_what_hooks_make_of_the_outputs_is_float32(compiled: bool) -> None:
    torch._dynamo.reset()
    model, weight = Returning(lambda x: x), torch.ones(4, 3)
    model.register_forward_hook(lambda module, given, made: {"scores": made @ weight})
    precision = apply(
        dataclasses.replace(BFLOAT16, compile=compiled), model, compile_backend="eager"
    )
    model.register_forward_hook(
        lambda module, given, made: made | {"sum": made["scores"] @ weight.T}
    )
    before = list(model._forward_hooks)
    for _ in range(2):
        with precision.autocast():
            found = model(torch.ones(1, 2))
        assert {name: each.dtype for name, each in found.items()} == {"scores": FULL, "sum": FULL}
    assert list(model._forward_hooks) == before


def test_a_packed_sequence_keeps_what_it_is() -> None:
    packed = pack_sequence([torch.ones(3, 2, dtype=LOW), torch.ones(1, 2, dtype=LOW)])
    output = results_to_float32([packed, Plain(packed.data)], set())
    assert isinstance(output[0], PackedSequence)
    assert output[0].data.dtype is FULL
    assert output[0].data is output[1].logits
    assert copy.copy(output[0]).batch_sizes is packed.batch_sizes
