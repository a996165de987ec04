"""The tasks of real size: tiny they train in both precisions, and in full they are as published."""

from __future__ import annotations

import pytest
import torch

from autoprec import apply_profile
from autoprec.backends.torch.measure import flops
from autoprec.backends.torch.train.task_runner import batches, build_model, build_optimizer
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecError
from benchmarks.checkout import REAL_TASKS
from tests.benchmarks.gpu.real_tasks import NAMES, SHARED, loaded

pytestmark = pytest.mark.torch


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REAL_TASK_SIZE", "tiny")


def losses(name: str, policy: Policy) -> list[float]:
    """The losses of two steps with one batch, and what is left of its loss after them."""
    with loaded(name) as task:
        model = build_model(task, "cpu", seed=0)
        optimizer = build_optimizer(task, model)
        drawn = batches(task, task.batch_size or 4, seed=0)
        inputs, targets = next(drawn)
        found = []
        with apply_profile(Recipe(policy=policy), model=model, optimizer=optimizer) as precision:
            for _ in range(2):
                loss = task.loss_fn(precision.forward(inputs), targets)
                assert precision.backward_and_step(loss, max_norm=task.clip_grad_norm)
                found.append(loss.item())
            found.append(task.loss_fn(precision.forward(inputs), targets).item())
        return found


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_task_learns_its_batch_and_bfloat16_follows_float32(name: str) -> None:
    float32, bfloat16 = (losses(name, p) for p in (Policy.FLOAT32, Policy.MIXED_BFLOAT16))
    assert float32[-1] < float32[0]
    assert bfloat16[-1] < bfloat16[0]
    assert bfloat16 != float32
    assert bfloat16[:2] == pytest.approx(float32[:2], rel=0.05)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", NAMES)
def test_a_tasks_batches_are_those_of_its_seed(name: str) -> None:
    with loaded(name) as task:
        one, same, other = (next(batches(task, 4, seed=seed)) for seed in (0, 0, 1))
    assert all(len(each) == 4 for each in one)
    assert all(torch.equal(*pair) for pair in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])


def of_transformer(parameters: int, layers: int, width: int, length: int) -> float:
    """Operations of a text in 10^9: 6 a parameter and word, 12 a layer, width and pair of words.

    The estimate of the PaLM paper (appendix B), which nanoGPT uses as well.
    """
    return (6 * parameters * length + 12 * layers * width * length**2) / 1e9


#: Parameters, and the operations of a sample's training step in 10^9: as torchvision's table of
#: models has them (ResNet-50, ViT-B/16, MobileNetV2 at 224 pixels), as the checkpoints of GPT-2 and
#: BERT have, else as the layers' shapes say. A multiply-add is two operations and a training step
#: three forward passes, but for the first layer, whose input needs no gradient. Attention counts as
#: dense.
PUBLISHED = {
    "resnet50": (25_557_032, 3 * 2 * 4.09),
    "vit_b16": (86_567_656, 3 * 2 * 17.56),
    "gpt2": (124_439_808, of_transformer(124_439_808, 12, 768, 1024)),
    "gpt2_rounded": (124_439_808 + 47 * 768, of_transformer(124_475_904, 12, 768, 1024)),
    "bert_128": (109_514_298, of_transformer(109_514_298, 12, 768, 128)),
    "bert_512": (109_514_298, of_transformer(109_514_298, 12, 768, 512)),
    "unet": (31_037_633, None),
    "llama_blocks": (872_448_000, of_transformer(872_448_000, 4, 4096, 4096)),
    "imagenette": (1_095_946, 3 * 2 * (128**2 * 2400 + 64**2 * 100_352 + 32**2 * 991_232) / 1e9),
    "mlp8192": (20_037_642, (6 * 20_037_642 - 2 * 784 * 4096) / 1e9),
    "mobilenet32": (3_504_872 - 1281 * 990, 3 * 2 * 0.300 * (32 / 224) ** 2),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_task_in_full_has_the_published_parameters_and_operations(name: str) -> None:
    parameters, operations = PUBLISHED[name]
    with loaded(name) as task:
        with torch.device("meta"):
            model = task.build_model()
        inputs, targets = (each.to("meta") for each in next(iter(task.build_data(2))))
        counted = flops.total(lambda: task.loss_fn(model(inputs), targets).backward()) / 2 / 1e9
    assert sum(p.numel() for p in model.parameters()) == parameters
    if operations is not None:
        assert counted == pytest.approx(operations, rel=0.03)


def test_a_size_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REAL_TASK_SIZE", "huge")
    said = "REAL_TASK_SIZE='huge' given, expected full or tiny"
    with pytest.raises(AutoprecError, match=said), loaded("mlp8192"):
        pass


def test_each_file_is_short_and_knows_nothing_of_autoprec() -> None:
    paths = [REAL_TASKS / f"{name}.py" for name in (*NAMES, *SHARED)]
    assert len(paths) == 14
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 150
        assert "import autoprec" not in text
        assert "from autoprec" not in text
