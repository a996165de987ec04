"""What a LightningModule finds at `self.trainer` while it is tuned: its Trainer, for reading."""

from __future__ import annotations

import math
from typing import Any

_BEFORE_TRAINING = {
    "current_epoch": 0,
    "global_step": 0,
    "training": True,
    "sanity_checking": False,
    "barebones": False,
    "is_global_zero": True,
    "is_last_batch": False,
    "optimizers": (),
    "train_dataloader": None,
    "lr_scheduler_configs": (),
    "logger": None,
    "loggers": (),
    "progress_bar_callback": None,
    "progress_bar_metrics": {},
    "logged_metrics": {},
    "callback_metrics": {},
    "world_size": 1,
    "global_rank": 0,
    "local_rank": 0,
}


class TrainerStandIn:
    """A Trainer that has not begun to train, and cannot be told anything.

    Loggers are not there, and what depends on the data (`estimated_stepping_batches`) is counted
    from the `batches` of an epoch; everything else is the Trainer's own.
    """

    def __init__(self, trainer: Any, datamodule: Any, module: Any) -> None:
        own = {"datamodule": datamodule, "lightning_module": module, "model": module}
        vars(self).update(_trainer=trainer, _own={**_BEFORE_TRAINING, **own})

    def use_loader(self, loader: Any) -> None:
        """Take the loader of the training data."""
        vars(self)["_own"]["train_dataloader"] = loader

    def use_optimizer(self, optimizer: Any) -> None:
        """Take the optimizer as the module made it, whose rates a step may read."""
        vars(self)["_own"]["optimizers"] = [optimizer]

    def optimizer(self, use_pl_optimizer: bool = True) -> Any:
        """Stand in for the module's `optimizers()`."""
        return self.optimizers[0]

    @property
    def num_training_batches(self) -> int | float:
        """Return the batches in an epoch; infinite where the loader has no length."""
        try:
            count: int = len(self.train_dataloader)
        except TypeError:
            return math.inf
        limit: int | float | None = self._trainer.limit_train_batches
        if isinstance(limit, int):
            return int(min(count, limit))
        return count if limit is None else int(count * limit)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Return the updates in the whole training, as the Trainer counts them."""
        steps, epochs = self._trainer.max_steps, self._trainer.max_epochs
        batches = self.num_training_batches
        if epochs in (None, -1) or batches == math.inf:
            return math.inf if steps == -1 else int(steps)
        counted: int = math.ceil(batches / self._trainer.accumulate_grad_batches) * max(epochs, 1)
        return counted if steps == -1 else min(counted, int(steps))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_own" not in vars(self):
            raise AttributeError(name)
        own = vars(self)["_own"]
        return own[name] if name in own else getattr(vars(self)["_trainer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"trainer.{name} is set while the module is tuned, where its Trainer can only be read"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerStandIn:
        return self
