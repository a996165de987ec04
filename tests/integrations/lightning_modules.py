"""LightningModules of `trained.Net`, as people write them, for either package."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from tests.integrations.trained import momentum, net

PACKAGES = ("lightning", "pytorch_lightning")

#: Strategies with a precision of their own, and what is said of them beside a profile.
STRATEGIES = {
    "FSDPStrategy": r"FSDP1.*ModelParallelStrategy",
    "DeepSpeedStrategy": r"DeepSpeed casts .*--to deepspeed",
    "SingleDeviceXLAStrategy": r"SingleDeviceXLAStrategy has .*DDP or FSDP2",
    "XLAStrategy": r"XLAStrategy has a precision of its own.*DDP or FSDP2",
}


def pytorch_of(package: str) -> Any:
    return importlib.import_module({"lightning": "lightning.pytorch"}.get(package, package))


def fabric_of(package: str) -> Any:
    name = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[package]
    return importlib.import_module(name)


def module_of(package: str, model: nn.Module | None = None, **settings: Any) -> Any:
    """Return a LightningModule with the model as `net`, that remembers losses and rates."""
    pl = pytorch_of(package)

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model or net(settings.get("dropout", 0.1))
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.rates: list[float] = []

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            torch.manual_seed(len(self.losses))  # for dropout, as `reference` does
            loss = nn.functional.cross_entropy(self.net(inputs), targets)
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            inputs, targets = batch
            self.log("val_loss", nn.functional.cross_entropy(self(inputs), targets))

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self(batch[0])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])
            norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
            self.norms.append(float(torch.stack(norms).norm()) if norms else 0.0)

        def configure_optimizers(self) -> Any:
            make = settings.get("optimizer", momentum)
            optimizer = make(self.parameters())
            if not settings.get("schedule"):
                return optimizer
            self.planned = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1.0, self.planned)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Lit()


def trainer_of(package: str, plugin: Any, **settings: Any) -> Any:
    """Return a Trainer on the CPU that writes and prints nothing."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 1.0,
    }
    plugins = [] if plugin is None else [plugin]
    return pytorch_of(package).Trainer(**{**quiet, "plugins": plugins, **settings})


def strategy_here(strategies: Any, name: str) -> Any:
    """Make a strategy whose package or device is not here, as far as a Trainer looks at it."""
    kind = getattr(strategies, name)
    own = [each for each in kind.__mro__ if each.__name__ in ("DDPStrategy", "ParallelStrategy")]
    base = own[0] if own else strategies.SingleDeviceStrategy
    settings = {} if own else {"device": torch.device("cpu")}
    made = {"__init__": lambda self: base.__init__(self, **settings)}
    return type(f"Our{name}", (kind,), {} if name == "FSDPStrategy" else made)()
