"""A Lightning Trainer, its module and its data are the task that a task file would make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autoprec.backends.capture import task_of
from autoprec.backends.protocol import Task
from autoprec.backends.shared import worker_process
from autoprec.backends.torch.backend import TorchBackend
from autoprec.errors import UsageError
from autoprec.workers.sent_objects import receive, sent
from autoprec.workers.training_calls import CALLS
from tests.backends.torch.capture.captured import (
    BATCHES,
    data,
    first,
    first_loss,
    net,
    optimizer_of,
    written_task,
)
from tests.integrations.lightning_modules import PACKAGES, pytorch_of, trainer_of

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("without_tensorflow"),
    pytest.mark.filterwarnings("default"),  # Lightning's own
]


def module_class(package: str) -> type[Any]:
    class Lit(pytorch_of(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Any:
            features, targets = batch
            loss = nn.functional.cross_entropy(self.net(features), targets)
            self.log("loss", loss, prog_bar=True)
            self.log_dict({"epoch": float(self.current_epoch), "rank": float(self.global_rank)})
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            assert self.trainer.global_step == 0
            return {"loss": loss}

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self)
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    return Lit


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(data(), **{"batch_size": 32, "shuffle": True, **settings})


def captured(package: str = "lightning", module: Any = None, **settings: Any) -> Task:
    trainer = trainer_of(package, None, **{"max_epochs": 3, **settings})
    given = module_class(package)() if module is None else module
    return task_of((trainer, given, loader()), name="train.py:build")


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("batch_size", BATCHES)
def test_the_first_loss_is_that_of_the_task_file(package: str, batch_size: int) -> None:
    assert first_loss(captured(package), batch_size) == pytest.approx(
        first_loss(written_task(), batch_size), rel=1e-6
    )


def test_a_trainer_with_its_module_and_loader_travels_as_it_is(tmp_path: Path) -> None:
    trainer = trainer_of("lightning", None, max_epochs=3)
    with sent((trainer, module_class("lightning")(), loader()), tmp_path) as path:
        assert path.name == "lit.pickle"
        task = task_of(receive(path), name="lit")
    assert first_loss(task, 16) == first_loss(captured(), 16)


def test_clip_accumulation_and_the_schedules_peak_are_the_tasks() -> None:
    task = captured(gradient_clip_val=0.7, accumulate_grad_batches=2)
    assert (task.clip_grad_norm, task.batch_size) == (0.7, 64)
    assert task.build_optimizer is not None
    optimizer = task.build_optimizer(task.build_model())
    assert {group["lr"] for group in optimizer.param_groups} == {0.3}


def test_it_is_described_and_the_only_child_is_the_model() -> None:
    facts = TorchBackend().describe(
        captured(), device="cpu", seed=0, batch_size=32, report=lambda *_: None
    )
    assert facts.batch_size == facts.samples == 32
    assert "first" in [unit.path for unit in facts.units]


def test_a_module_with_several_children_is_the_model_itself() -> None:
    class Two(module_class("lightning")):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

    model = captured(module=Two()).build_model()
    assert {path.partition(".")[0] for path, _ in model.named_parameters()} == {"net", "head"}


def test_what_is_around_the_model_moves_with_it() -> None:
    class Weighted(module_class("lightning")):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(3))

        def training_step(self, batch: Any, index: int) -> Any:
            assert self.device == self.weight.device == next(self.net.parameters()).device
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1], self.weight)

    task = captured(module=Weighted())
    model = task.build_model().to("meta")
    assert task.training_step is not None
    batch = [torch.zeros(8, 6, device="meta"), torch.zeros(8, device="meta").long()]
    assert task.training_step(model, batch).device.type == "meta"


def test_what_fit_calls_before_it_trains_is_called_once_in_its_order() -> None:
    pl, called = pytorch_of("lightning"), []

    class Data(pl.LightningDataModule):  # type: ignore[misc]
        def prepare_data(self) -> None:
            called.append("prepare_data")

        def setup(self, stage: str) -> None:
            called.append(f"setup {stage} with {self.trainer.world_size} rank")

        def train_dataloader(self) -> Any:
            called.append("train_dataloader")
            return loader(batch_size=16)

        def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
            return batch[0] * 0.0, batch[1]

    class Late(module_class("lightning")):  # type: ignore[misc]
        def configure_model(self) -> None:
            called.append("configure_model")

        def configure_optimizers(self) -> Any:
            called.append("configure_optimizers")
            return super().configure_optimizers()

    task = task_of((trainer_of("lightning", None, max_epochs=1), Late(), Data()), name="task")
    assert called == [
        "prepare_data",
        "setup fit with 1 rank",
        "configure_model",
        "train_dataloader",
        "configure_optimizers",
    ]
    assert task.batch_size == 16
    assert first_loss(task, 16) != first_loss(written_task(), 16)  # the datamodule's hook counts


def test_a_batch_changed_before_it_is_moved_comes_so_from_the_data() -> None:
    class Doubled(module_class("lightning")):  # type: ignore[misc]
        def on_before_batch_transfer(self, batch: Any, index: int) -> Any:
            return torch.full_like(batch[0], 2.0), batch[1]

    task = captured(module=Doubled())
    assert all(bool((features == 2.0).all()) for features, _ in first(task.build_data(8)))


def test_a_training_step_may_take_items_out_of_a_batch() -> None:
    class Popping(module_class("lightning")):  # type: ignore[misc]
        def training_step(self, batch: Any) -> Any:
            targets = batch.pop()
            return nn.functional.cross_entropy(self.net(batch.pop()), targets)

    task, batch = captured(module=Popping()), [torch.randn(8, 6), torch.zeros(8).long()]
    assert task.training_step is not None
    for _ in range(2):
        task.training_step(task.build_model(), batch)
    assert len(batch) == 2


def manual(package: str) -> Any:
    module = module_class(package)()
    module.automatic_optimization = False
    return module


def with_optimizers(count: int) -> Any:
    class Several(module_class("lightning")):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return [optimizer_of(self) for _ in range(count)] or None

    return Several()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "manual optimization": (lambda: manual("lightning"), {}, "optimizes manually"),
    "two optimizers": (lambda: with_optimizers(2), {}, "returned 2 optimizers, expected one"),
    "no optimizer": (lambda: with_optimizers(0), {}, "returned no optimizers, expected one"),
    "clipping by value": (
        lambda: None,
        {"gradient_clip_algorithm": "value"},
        "use gradient_clip_algorithm='norm'",
    ),
    "true bfloat16": (lambda: None, {"precision": "bf16-true"}, "leave `precision` out"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_tuned_is_refused_with_the_way_out(case: str) -> None:
    module, settings, message = REFUSED[case]
    with pytest.raises(UsageError, match=r"train.py:build: ") as caught:
        captured(module=module(), **settings)
    assert message.lower() in str(caught.value).lower()


class FSDPStrategy:
    """As Lightning's is called, which wants a GPU to be made."""


def test_a_strategy_that_shards_by_itself_is_refused() -> None:
    trainer = trainer_of("lightning", None)
    trainer._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(UsageError, match=r"FSDPStrategy shards and casts the model itself\. Tune"):
        task_of((trainer, module_class("lightning")(), loader()), name="task")


def test_a_schedule_of_accumulation_is_refused() -> None:
    callback = pytorch_of("lightning").callbacks.GradientAccumulationScheduler({0: 2, 1: 4})
    with pytest.raises(UsageError, match="Leave the callback out while tuning"):
        captured(callbacks=[callback])


def test_several_loaders_are_refused() -> None:
    trainer = trainer_of("lightning", None)
    with pytest.raises(UsageError, match="2 training loaders were given in a dict"):
        task_of((trainer, module_class("lightning")(), {"a": loader(), "b": loader()}), name="task")


def test_no_data_is_told() -> None:
    with pytest.raises(UsageError, match="Lit came without training data"):
        task_of((trainer_of("lightning", None), module_class("lightning")()), name="task")


def test_what_is_not_part_of_a_step_is_noted() -> None:
    class Own(module_class("lightning")):  # type: ignore[misc]
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("not called")

    captured(module=Own())
    assert any("Own.optimizer_step is not part of the steps" in n for n in worker_process.notes())


def test_a_fit_that_resumes_is_told_from_which_weights_trials_begin() -> None:
    (call, *_) = (each for each in CALLS if each.trainer == "Lightning")
    trainer = trainer_of("lightning", None, max_epochs=3)
    given = {"self": trainer, "model": module_class("lightning")()}
    call.task_of(
        {**given, "train_dataloaders": loader(), "ckpt_path": "runs/last.ckpt"}, "train.py"
    )
    (said,) = (each for each in worker_process.notes() if "runs/last.ckpt" in each)
    assert "is not loaded: trials begin with the weights that the module holds" in said
    assert "`--checkpoint FILE`" in said


def test_the_trainer_can_be_read_and_not_told() -> None:
    class Telling(module_class("lightning")):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Any:
            self.trainer.should_stop = True

    task = captured(module=Telling())
    assert task.training_step is not None
    with pytest.raises(AttributeError, match="should_stop is set while the module is tuned"):
        task.training_step(task.build_model(), next(iter(task.build_data(8))))
