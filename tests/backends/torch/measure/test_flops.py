"""Operations by module: the parts sum to torch's total, and who computes nothing has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autoprec.backends.torch.measure.flop_formulas import formulas
from autoprec.backends.torch.measure.flops import OUTSIDE, count, registry, total
from tests.backends.torch.described import facts

pytestmark = pytest.mark.torch

SIZE, BATCH = 16, 8
PRODUCT = 2 * BATCH * SIZE * SIZE  # of a batch with one square matrix


def square() -> nn.Linear:
    return nn.Linear(SIZE, SIZE)


def inputs(batch: int = BATCH, *, grad: bool = True) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, SIZE, requires_grad=grad)


def counted(model: nn.Module, run: Callable[[], object]) -> dict[str, float]:
    """Return what is not 0, in products with a square matrix; the parts sum to torch's total."""
    found = count(model, run)
    assert sum(found.values()) == total(run) > 0
    return {path: flops / PRODUCT for path, flops in found.items() if flops}


def trained(model: nn.Module, **options: Any) -> dict[str, float]:
    def run() -> None:
        model(inputs(**options)).sum().backward()

    return counted(model, run)


class Lists(nn.Module):
    """Lists in lists, a dictionary, and nothing computed by anything but the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([square(), square()]) for _ in range(2))
        self.heads = nn.ModuleDict({"a": square(), "b": square()})
        self.rows = nn.Sequential(square(), square())  # iterated, never called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for layer in block:
                x = layer(x)
        for row in self.rows:
            x = row(x)
        return self.heads["a"](x) + self.heads["b"](x)


def test_the_total_is_torchs() -> None:
    model = Lists()
    counter = FlopCounterMode(display=False, custom_mapping=formulas())
    with counter:
        model(inputs()).sum().backward()
    assert counter.get_total_flops() == total(lambda: model(inputs()).sum().backward())


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("made", [nn.Conv2d, nn.ConvTranspose2d])
def test_each_gradient_of_a_convolution_in_groups_costs_its_forward_pass(
    made: type[nn.Module], groups: int
) -> None:
    convolution = made(8, 8, 3, padding=1, groups=groups)
    images = torch.randn(2, 8, 5, 5, requires_grad=True)
    forward = 2 * 2 * 25 * 9 * 8 * 8 // groups
    assert total(lambda: convolution(images)) == forward
    assert total(lambda: convolution(images).sum().backward()) == 3 * forward
    assert total(lambda: convolution(images.detach()).sum().backward()) == 2 * forward


def test_a_bilinear_form_costs_a_product_with_its_matrix_for_each_result() -> None:
    form = nn.Bilinear(SIZE, 6, 5)
    one, other = inputs(), torch.randn(BATCH, 6, requires_grad=True)
    inner = 2 * BATCH * 5 * SIZE * 6
    forward = inner + 2 * BATCH * 5 * 6
    assert total(lambda: form(one, other)) == forward
    trained_total = total(lambda: form(one, other).sum().backward())
    assert forward + 3 * inner <= trained_total <= forward + 4 * inner


def test_a_complex_product_is_four_real_ones() -> None:
    real, complex_ = torch.randn(BATCH, SIZE), torch.randn(BATCH, SIZE, dtype=torch.complex64)
    matrix = torch.randn(SIZE, SIZE, dtype=torch.complex64, requires_grad=True)
    assert total(lambda: real @ matrix.real) == PRODUCT
    assert total(lambda: complex_ @ matrix) == 4 * PRODUCT
    assert total(lambda: (complex_ @ matrix).abs().sum().backward()) == 8 * PRODUCT
    kernel = torch.randn(SIZE, SIZE, 1, dtype=torch.complex64)
    convolved = total(lambda: F.conv1d(complex_[..., None], kernel))
    assert convolved in (3 * PRODUCT, 4 * PRODUCT)  # torch may do with three real ones


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_a_quantised_layer_costs_what_it_cost(dtype: torch.dtype) -> None:
    layers = nn.Sequential(square(), nn.ReLU(), square())
    quantised = torch.ao.quantization.quantize_dynamic(layers, {nn.Linear}, dtype)
    assert not any(isinstance(each, nn.Linear) for each in quantised)
    assert total(lambda: quantised(inputs(grad=False))) == 2 * PRODUCT
    frozen = nn.Sequential(quantised, square())
    assert counted(frozen, lambda: quantised(inputs(grad=False))) == {"0.0": 1.0, "0.2": 1.0}


def test_products_with_a_vector_count() -> None:
    matrix, vector = torch.randn(SIZE, SIZE), torch.randn(SIZE)
    assert total(lambda: matrix @ vector) == 2 * SIZE * SIZE
    assert total(lambda: torch.addmv(vector, matrix, vector)) == 2 * SIZE * SIZE
    assert total(lambda: vector @ vector) == 2 * SIZE
    assert total(lambda: torch.addbmm(matrix, matrix[None], matrix[None])) == 2 * SIZE**3
    grouped = torch.randn(BATCH, 5, SIZE)
    assert total(lambda: grouped @ vector) == 2 * BATCH * 5 * SIZE


@pytest.mark.filterwarnings("ignore:.*beta state:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_of_a_sparse_matrix_what_it_holds_counts(layout: str) -> None:
    dense = torch.eye(BATCH)
    dense[0, 1:3] = 1.0
    sparse = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    for product in (lambda: sparse @ inputs(), lambda: torch.sparse.mm(sparse, inputs())):
        assert total(product) == 2 * (BATCH + 2) * SIZE


def test_whole_recurrent_layers_of_accelerators_count_each_step_of_each_layer() -> None:
    """No such device is needed for the number: shapes are what an operator is given."""
    layers = nn.LSTM(5, SIZE, 2, bidirectional=True)
    weights = [each.detach() for each in layers.parameters()]
    steps = torch.randn(7, BATCH, 5)
    once = 2 * 7 * BATCH * sum(each.numel() for each in weights if each.ndim > 1)
    cudnn = torch.ops.aten._cudnn_rnn
    assert registry()[cudnn](steps, weights, 4, None, out_val=steps) == once
    assert registry()[torch.ops.aten._cudnn_rnn_backward](steps, weights, 4) == 2 * once


def test_containers_that_are_never_called_count_nothing_twice() -> None:
    leaves = [f"blocks.{i}.{j}" for i in (0, 1) for j in (0, 1)]
    leaves += ["heads.a", "heads.b", "rows.0", "rows.1"]
    assert trained(Lists()) == dict.fromkeys(leaves, 3.0)
    assert trained(Lists(), grad=False) == {**dict.fromkeys(leaves, 3.0), "blocks.0.0": 2.0}


class Shared(nn.Module):
    """A head that its parent never calls, a module under two names, and products of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Caller()
        self.decoder = Caller()
        self.decoder.called = self.encoder.held
        self.again = self.encoder.held
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.decoder(self.again(x))
        return self.encoder.held(x) @ self.weight


class Caller(nn.Module):
    called: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.held = square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x)


def test_a_module_counts_for_itself_whoever_calls_it_and_however_often() -> None:
    assert trained(Shared()) == {"encoder.held": 9.0, "": 3.0}


def test_only_the_operations_that_run_are_counted_where_a_part_is_frozen() -> None:
    model = nn.Sequential(square(), square(), square())
    model[:2].requires_grad_(False)
    assert trained(model, grad=False) == {"0": 1.0, "1": 1.0, "2": 2.0}


class Block(nn.Module):
    """A product of its own, with a module's before and an unregistered one's behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = square()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.hidden = [square()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](torch.tanh(self.first(x) @ self.weight))


class Blocks(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(
    ("reentrant", "own", "first"), [(None, 6.0, 3.0), (True, 8.0, 4.0), (False, 7.0, 4.0)]
)
def test_what_a_checkpoint_runs_again_counts_for_the_same_modules(
    reentrant: bool | None, own: float, first: float
) -> None:
    """What is not needed again (the last product's result) is not computed again."""
    blocks = {f"blocks.{i}": own for i in (0, 1)} | {f"blocks.{i}.first": first for i in (0, 1)}
    assert trained(Blocks(reentrant)) == blocks


class Closure(nn.Module):
    """A checkpoint around its own code, which ends and begins in a module."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Tanh(), nn.LayerNorm(SIZE)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.first(x) @ self.weight)

        return checkpoint(run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_of_a_function_runs_again_counts_for_its_caller(reentrant: bool) -> None:
    model = nn.Sequential(square(), Closure(reentrant), square(), Closure(reentrant))
    assert trained(model) == {"0": 3.0, "1": 4.0, "2": 3.0, "3": 4.0}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * (x @ weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * (gradients[0] @ weight.t()), 2 * (x.t() @ gradients[0])


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


def test_a_functions_own_backward_pass_counts_for_the_module_that_called_it() -> None:
    assert trained(nn.Sequential(square(), ByHand(), square())) == {"0": 3.0, "1": 3.0, "2": 3.0}


class Forces(nn.Module):
    """Its forward pass holds a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([square(), square()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = x
        for layer in self.layers:
            energy = torch.tanh(layer(energy))
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return forces


def test_gradients_of_gradients_count_for_the_layers() -> None:
    """A forward pass and a backward pass by its inputs alone, and both gradients of the two."""
    assert trained(Forces()) == {"layers.0": 6.0, "layers.1": 6.0}


def test_torch_func_is_followed() -> None:
    model = nn.Sequential(square(), nn.Tanh(), square())
    weights = dict(model.named_parameters())

    def energy(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).sum()

    found = counted(
        model, lambda: torch.func.vmap(torch.func.grad(energy))(inputs()).square().sum().backward()
    )
    assert set(found) == {"0", "2"}


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([square(), square()])
        self.classify = square()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.encode(x))


def test_what_runs_outside_of_the_models_forward_pass_is_nobodys() -> None:
    model, other = Methods(), square()

    def run() -> None:
        left, right = model.encode(inputs()), model.encode(inputs())
        similar = left @ right.t()  # 2 * BATCH * BATCH * SIZE operations, three times
        (similar.sum() + other(model.classify(left)).sum()).backward()

    found = counted(model, run)
    assert found[OUTSIDE] == pytest.approx(3 * BATCH / SIZE + 3)
    del found[OUTSIDE]
    assert found == {"layers.0": 6.0, "layers.1": 6.0, "classify": 3.0}


def test_a_module_that_raised_is_left() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.broken = Broken()
            self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ZeroDivisionError):
                self.broken(x)
            return x @ self.weight

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    assert trained(Fragile()) == {"": 3.0}


def test_no_hooks_are_left_behind() -> None:
    model = Lists()
    before = len(nn.modules.module._global_forward_hooks)
    with pytest.raises(ZeroDivisionError):
        count(model, lambda: [model(inputs()), 1 / 0])
    assert len(nn.modules.module._global_forward_hooks) == before
    assert len(nn.modules.module._global_forward_pre_hooks) == 0


def batches(batch_size: int) -> Iterator[Any]:
    while True:
        yield torch.randn(batch_size, SIZE), torch.randn(batch_size, SIZE)


def test_a_task_has_the_operations_of_its_step_and_its_units_share_the_models() -> None:
    """Also those of the loss, which no unit does."""

    def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs @ targets.t(), torch.arange(len(targets)))

    found = facts(batch_size=BATCH, build_model=Lists, build_data=batches, loss_fn=contrast)
    loss = 2 * (2 * BATCH * BATCH * SIZE)  # targets need no gradient
    assert found.flops_per_sample == ((3 * 8 - 1) * PRODUCT + loss) / BATCH
    shares = {unit.path: unit.products for unit in found.units}
    assert shares[""] == 0.0
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["heads.a"] == pytest.approx(3 / (3 * 8 - 1))
