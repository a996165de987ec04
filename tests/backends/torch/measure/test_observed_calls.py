"""What a pass shows of attention's lengths and of outputs that outlive the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoprec.backends.torch.measure import observed_calls
from autoprec.backends.torch.measure.observed_calls import attention_length, keeps_outputs

HELD: list[Tensor] = []


def attend(queries: int, keys: int, **more: Any) -> Tensor:
    query, key = torch.randn(2, 4, queries, 8), torch.randn(2, 4, keys, 8)
    return functional.scaled_dot_product_attention(query, key, key, **more)


@pytest.mark.parametrize(
    ("run", "length"),
    [
        (lambda: torch.ones(3), 0),
        (lambda: attend(5, 7), 7),
        (lambda: (attend(5, 7), attend(9, 9), attend(2, 3)), 9),
        (lambda: attend(5, 7, is_causal=True), 7),
        (lambda: (attend(5, 7), attend(5, 7, dropout_p=0.1)), 7),
        (lambda: attend(5, 7, attn_mask=None, dropout_p=0.0), 7),
        (lambda: nn.MultiheadAttention(8, 2)(*3 * [torch.ones(6, 2, 8)], need_weights=False), 6),
    ],
)
def test_the_longest_row_of_scores_counts_where_none_drop_out(
    run: Callable[[], object], length: int
) -> None:
    assert attention_length(run) == length


class Keeping(nn.Linear):
    """A model that may keep what it returned last."""

    keeps = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        result = super().forward(input)
        if self.keeps:
            self.last = result
        return result


def test_dropout_in_a_kernel_leaves_nothing_to_compare() -> None:
    """A CPU's kernel has none; this is how a GPU's is called."""
    query = torch.randn(2, 4, 6, 8)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert attention_length(lambda: flash(query, query, query)) == 6
    called = [flash.default, (), (query, query, query, 0.1)]
    calls = observed_calls._AttentionCalls()
    with pytest.raises(RuntimeError):
        calls.__torch_dispatch__(*called)
    assert calls.drops


@pytest.mark.parametrize("way", ["nothing", "loop", "model", "detached"])
def test_outputs_that_are_held_when_the_step_is_over_are_found(way: str) -> None:
    model = Keeping(4, 2)
    model.keeps = way == "model"

    def step() -> None:
        output = model(torch.ones(3, 4))
        output.square().mean().backward()
        if way == "loop":
            HELD.append(output)
        if way == "detached":
            HELD.append(output.detach().clone())

    HELD.clear()
    assert keeps_outputs(model, step) is (way in ("loop", "model"))
    assert not model._forward_hooks
