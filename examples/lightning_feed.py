"""Trains with Lightning on a Feed, and resumes in mid-epoch with equal batches.

python examples/lightning_feed.py DATA_DIR [CHECKPOINT]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Brisk is used from its checkout

import lightning
import torch
from torch import nn

from pipelines import Feed


class Images(lightning.LightningDataModule):
    """Both splits. Lightning saves the state of a feed with its own checkpoint, as a feed has state_dict()."""

    def __init__(self, data_dir: str, **options) -> None:
        super().__init__()
        self.data_dir, self.options, self.feeds = data_dir, options, []

    def _open(self, split: str) -> Feed:
        self.feeds.append(Feed(self.data_dir, split, device=self.trainer.strategy.root_device, **self.options))
        return self.feeds[-1]

    def train_dataloader(self) -> Feed:
        return self._open("train")

    def val_dataloader(self) -> Feed:
        return self._open("val")

    def teardown(self, stage: str) -> None:
        while self.feeds:
            self.feeds.pop().close()


class Classifier(lightning.LightningModule):
    """A small network on uint8 images."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, num_classes)
        )

    def loss(self, batch) -> torch.Tensor:
        images, targets = batch
        return nn.functional.cross_entropy(self.net(images.float() / 255), targets)

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(data_dir: str, checkpoint: str | None = None) -> None:
    """Train three epochs, from `checkpoint` on if there is one."""
    save = lightning.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=100, save_top_k=-1)
    trainer = lightning.Trainer(max_epochs=3, callbacks=[save])
    images = Images(data_dir, batch_size=64, image_size=64)
    with Feed(data_dir, "train", batch_size=1, image_size=64, cache="none") as feed:
        model = Classifier(len(feed.classes))
    trainer.fit(model, images, ckpt_path=checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
