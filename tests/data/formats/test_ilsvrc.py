"""ImageNet in every form that it is downloaded in: the same images, labels and order."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tests.shards import write_flat_csv, write_flat_devkit, write_ilsvrc, write_imagenet, write_kaggle
from utils.data.images.manifest import Manifest
from utils.data.reading.reader import read_image
from utils.data.splits.selection import Splits, read_data
from utils.distributed.group import DistEnv
from utils.options.config import TrainConfig


def listed(root: Path, env: DistEnv, **values: Any) -> Splits:
    return read_data(dataclasses.replace(TrainConfig(data_dir=root, output_dir=root / "out", workers=2), **values), env)


def facts(manifest: Manifest) -> tuple[Any, ...]:
    contents = [read_image(manifest.record(index)) for index in range(len(manifest))]
    return manifest.classes, manifest.names(), manifest.labels.tolist(), manifest.fingerprint, contents


def test_every_form_has_the_same_images(tmp_path: Path, cpu: DistEnv) -> None:
    folders = write_imagenet(tmp_path / "folders")
    archives = write_ilsvrc(folders, tmp_path / "archives")
    kaggle = write_kaggle(folders, tmp_path / "kaggle")
    devkit, table = write_flat_devkit(folders, tmp_path / "devkit"), write_flat_csv(folders, tmp_path / "table")

    expected = {split: facts(manifest) for split, manifest in listed(folders, cpu).items()}
    for root in (archives, kaggle, kaggle / "ILSVRC/Data/CLS-LOC", devkit, table):
        found = listed(root, cpu)
        assert {split: facts(manifest) for split, manifest in found.items()} == expected, root
        assert np.array_equal(facts(listed(root, cpu, evaluate=True)["val"])[2], expected["val"][2]), root
