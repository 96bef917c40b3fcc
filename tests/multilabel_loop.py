"""A plain training loop of torch, torchvision, timm and scikit-learn on a label file: python -m tests.multilabel_loop.

What `tests.multilabel_table` compares train.py with: the same network, recipe and sizes, without anything of Brisk.
"""

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from sklearn.metrics import average_precision_score
from timm.optim import create_optimizer_v2
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2


class Images(Dataset[Any]):
    def __init__(self, root: Path, split: str, classes: list[str], transform: Any) -> None:
        self.root, self.classes, self.transform = root, classes, transform
        self.rows = list(csv.DictReader((root / f"{split}.csv").open()))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        labels = self.rows[index]["label"].split("|")
        target = torch.tensor([float(name in labels) for name in self.classes])
        return self.transform(Image.open(self.root / self.rows[index]["file"]).convert("RGB")), target


def train(root: Path, arch: str, size: int, epochs: int, batch: int, lr: float, workers: int, seed: int) -> list[float]:
    """mAP of the validation images after each epoch, percent."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    classes = sorted({name for row in csv.DictReader((root / "train.csv").open()) for name in row["label"].split("|")})
    model = timm.create_model(arch, num_classes=len(classes)).to(device, memory_format=torch.channels_last)
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    crop = [v2.RandomResizedCrop(size, scale=(0.35, 1)), v2.RandomHorizontalFlip()]
    whole = [v2.Resize(round(size * 8 / 7)), v2.CenterCrop(size)]
    options: dict[str, Any] = {"batch_size": batch, "num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(Images(root, "train", classes, v2.Compose(crop + end)), shuffle=True, drop_last=True, **options)
    val = DataLoader(Images(root, "val", classes, v2.Compose(whole + end)), **options)
    optimizer = create_optimizer_v2(model, "adamw", lr=lr, weight_decay=0.05)
    steps, warmup, criterion = epochs * len(loader), epochs * len(loader) // 10, nn.BCEWithLogitsLoss()
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * max(step - warmup, 0) / (steps - warmup))),
    )
    found = []
    for _ in range(epochs):
        model.train()
        for images, targets in loader:
            images = images.to(device, memory_format=torch.channels_last)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = criterion(model(images).float(), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            pairs = [(model(images.to(device)).float().cpu(), targets) for images, targets in val]
        scores, targets = (torch.cat(each).numpy() for each in zip(*pairs, strict=True))
        found.append(100 * float(average_precision_score(targets, scores, average="macro")))
    return found


if __name__ == "__main__":
    print(json.dumps(train(Path(sys.argv[1]), **json.loads(sys.argv[2]))))
