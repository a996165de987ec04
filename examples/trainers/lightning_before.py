"""Handwritten digits with Lightning: a DataModule, OneCycleLR, clipping, checkpoints."""

import lightning as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        digits = load_digits()
        pixels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
        data = TensorDataset(pixels, torch.tensor(digits.target))
        self.train, self.valid = random_split(data, [1437, 360], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.valid, batch_size=self.batch_size)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(16 * 64, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        outputs = self.model(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(outputs, batch[1]))
        self.log("val_acc", (outputs.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="auto",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[
            ModelCheckpoint("checkpoints", every_n_train_steps=20, save_last=True),
            EarlyStopping("val_loss", patience=3),
        ],
    )
    trainer.fit(Classifier(), Digits(batch_size=32))
    print(f"accuracy {float(trainer.callback_metrics['val_acc']):.3f}")
