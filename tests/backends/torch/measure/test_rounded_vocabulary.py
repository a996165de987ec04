"""A vocabulary is rounded in every layer that has it, for a timing alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoprec.backends.protocol import RoundingBackend, Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.backends.torch.measure.rounded_vocabulary import round_vocabulary


class Words(nn.Module):
    def __init__(self, *, tied: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.body(self.embedding(words))))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_layer_of_that_size_is_rounded_and_computes_what_it_did(
    tied: bool, bias: bool
) -> None:
    model, words = Words(tied=tied, bias=bias), torch.arange(12).reshape(3, 4)
    before = model(words)
    round_vocabulary(model, 50, 64)
    assert (model.embedding.num_embeddings, model.head.out_features) == (64, 64)
    assert (model.head.weight is model.embedding.weight) is tied
    assert model.body.weight.shape == (8, 8)
    after = model(words)
    assert after.shape == (3, 4, 64)
    torch.testing.assert_close(after[..., :50], before)
    after.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_a_model_without_such_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="no embedding or linear layer of 51"):
        round_vocabulary(Words(), 51, 64)


def test_the_backend_builds_the_rounded_model_and_leaves_the_task_as_it_is() -> None:
    backend = TorchBackend()
    assert isinstance(backend, RoundingBackend)
    task = Task("words.py", Words, lambda size: [], batch_size=8)
    rounded = backend.with_rounded_vocabulary(task, 50, 64)
    assert rounded.build_model().head.out_features == 64
    assert task.build_model().head.out_features == 50
    assert rounded.batch_size == 8
