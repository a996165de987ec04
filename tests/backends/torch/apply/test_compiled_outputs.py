"""What a compiled model returns holds all that the model returned, in float32."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from autoprec import Policy, Recipe, apply_profile


class Outputs(OrderedDict[str, torch.Tensor]):
    """As those of Hugging Face's models are."""


class Model(nn.Module):
    """Returns what autocast leaves in float32 beside what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> Outputs:
        logits = self.head(inputs)
        return Outputs(loss=logits.float().sum(), logits=logits)


def test_a_compiled_models_mapping_keeps_what_was_float32_already() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=4)
    precision = apply_profile(recipe, model=model, optimizer=optimizer, watch=False)
    compiled = torch.compile(model, backend="eager")
    with precision.autocast():
        outputs = compiled(torch.randn(4, 8))
    assert list(outputs) == ["loss", "logits"]
    assert {each.dtype for each in outputs.values()} == {torch.float32}
