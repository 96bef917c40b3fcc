"""Command lines that are refused, which name files of a run or of a script, and the folder in which they run."""

import importlib
import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.damage import ARITHMETIC as JPEG
from tests.harness import read_checkpoint
from tests.inference.embedded import write_embeddings
from tests.inference.exported import write_checkpoint
from tests.shards import write_tar


class Command(NamedTuple):
    """A command line that is refused.

    Attributes:
        what: is wrong.
        line: the program's file and its words; paths are those of the folder of `prepare`.
    """

    what: str
    line: str

    @property
    def program(self) -> Callable[[Sequence[str]], int]:
        """`main` of the program."""
        name = self.line.partition(".")[0]
        main: Callable[[Sequence[str]], int] = importlib.import_module(
            name if name == "train" else f"scripts.{name}"
        ).main
        return main

    @property
    def words(self) -> list[str]:
        """What `main` gets."""
        return shlex.split(self.line)[1:]


def prepare(folder: Path) -> None:
    """What the command lines name: a run of `test_resnet`, checkpoints that are damaged or do not fit, images."""
    best = write_checkpoint(folder / "run" / "best.pt", result={"val/top1": 50.0})
    saved = read_checkpoint(best.parent, best.name)
    step = {"epoch": 1, "step": 1, "train/loss": 2.0, "lr": 0.1}
    for name, lines in (("run", [json.dumps(step)]), ("cut", [json.dumps(step), "nonsense", json.dumps(step)])):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        (folder / name / "config.json").write_text('{"arch": "test_resnet"}')
    (folder / "cut.pt").write_bytes(best.read_bytes()[:-1000])
    (folder / "text.pt").write_text("no")
    torch.save({"a": torch.ones(1)}, folder / "weights.pt")
    torch.save(saved | {"format": 5}, folder / "format.pt")
    torch.save(saved | {"ranks": None}, folder / "part.pt")
    torch.save(saved | {"config": saved["config"] | {"num_classes": 5}}, folder / "head.pt")
    torch.save(saved | {"config": saved["config"] | {"arch": "test_vit"}}, folder / "arch.pt")
    runs: dict[str, dict[str, Any]] = {
        "a1": {"fold": "1/2"}, "a2": {"fold": "2/2"}, "again": {"fold": "1/2"}, "third": {"fold": "2/3"},
        "several": {"fold": "2/2", "task": "multilabel"}, "moved": {"fold": "2/2", "data": Path("/data/moved")},
    }  # fmt: skip
    for name, settings in runs.items():
        write_checkpoint(folder / name / "best.pt", **({"data": Path("/data/waste")} | settings))
    torch.save(read_checkpoint(folder / "a2", "best.pt") | {"classes": ["a", "b", "c"]}, folder / "others.pt")
    several = {"task": "multilabel", "loss": "bce", "label_smoothing": 0.0, "best_by": "map"}
    torch.save(saved | {"config": saved["config"] | several}, folder / "several.pt")
    torch.save(saved | {"classes": ["blue", "green", "unknown"]}, folder / "unknown.pt")
    torch.save(saved | {"temperature": {"model": 0.0}}, folder / "cold.pt")
    torch.save(saved, folder / "last.pt")
    torch.save(saved | {"classes": ["0", "1", "2"]}, folder / "numbers.pt")
    write_checkpoint(folder / "pit.pt", arch="pit_ti_224", image_size=64, val_resize=64)
    os.mkfifo(folder / "pipe.pt")
    (folder / "image.jpg").write_bytes(JPEG)
    (folder / "images.tar.gz").touch()
    write_tar(folder / "none.tar", {})
    _write_features(folder)
    for name in ("half/val/red", "animals/train/cat", "animals/val/cat", "colors/blue", "colors/green", "colors/red"):
        (folder / name).mkdir(parents=True)
        (folder / name / "image.jpg").write_bytes(JPEG)
    for name in ("empty", "results/confusion.csv"):
        (folder / name).mkdir(parents=True)
    for name in ("exported/model.safetensors", "mine/file", "drawn/heatmaps"):
        (folder / name).parent.mkdir()
        (folder / name).touch()


def _write_features(folder: Path) -> None:
    """Embeddings, good ones and others."""
    features, targets = np.eye(3, 4), ("blue", "green", "red")
    for name in ("train", "val", "alone", "long"):
        write_embeddings(folder / name, features, targets)
    (folder / "alone" / "embeddings.json").unlink()
    np.save(folder / "long" / "embeddings.npy", np.zeros((5, 4), np.float32))
    write_embeddings(folder / "wide", np.eye(3, 5), targets)
    write_embeddings(folder / "later", features, targets, step=2)
    write_embeddings(folder / "unlabeled", features, ("", "", ""))
    write_embeddings(folder / "single", features, ("red", "red", ""))
    write_embeddings(folder / "nan", features * np.nan, targets)


_PREDICT, _EXPORT = "predict.py run image.jpg --output-dir out", "export.py run --output-dir out"
_TEACHER = "train.py --loader synthetic --num-classes 3 --device cpu --image-size 32 --output-dir out --teacher"
COMMANDS = [
    Command("no teacher", f"{_TEACHER} none.pt"),
    Command("no network of timm's", f"{_TEACHER} resnet5o"),
    Command("no variant of timm's", f"{_TEACHER} resnet50.a9_in1k"),
    Command("a network of timm's without weights", f"{_TEACHER} coatnet_0_224"),
    Command("a teacher of ImageNet's classes", f"{_TEACHER} resnet18"),
    Command("a teacher of other classes", f"{_TEACHER} run"),
    Command("a teacher of more classes", f"{_TEACHER} numbers.pt --num-classes 2"),
    Command("a teacher of several labels", f"{_TEACHER} several.pt"),
    Command("a folder without a teacher", f"{_TEACHER} empty"),
    Command("embeddings for a teacher", f"{_TEACHER} train"),
    Command("a file of embeddings for a teacher", f"{_TEACHER} train/embeddings.npy"),
    Command("a teacher that was cut off", f"{_TEACHER} cut.pt"),
    Command("a teacher that is a pipe", f"{_TEACHER} pipe.pt"),
    Command("text for a teacher", f"{_TEACHER} text.pt"),
    Command("weights of an unknown architecture", f"{_TEACHER} weights.pt"),
    Command("weights of another architecture", f"{_TEACHER} arch.pt"),
    Command("a teacher beside this run", "train.py --loader synthetic --teacher run --output-dir run"),
    Command("a teacher for an evaluation", f"{_TEACHER} run --evaluate"),
    Command("more than all of the loss", f"{_TEACHER} run --teacher-weight 1.5"),
    Command("a negative share of the loss", f"{_TEACHER} run --teacher-weight -0.1"),
    Command("a share that is no number", f"{_TEACHER} run --teacher-weight nan"),
    Command("a word for a share", f"{_TEACHER} run --teacher-weight half"),
    Command("no temperature", f"{_TEACHER} run --teacher-temperature 0"),
    Command("a negative temperature", f"{_TEACHER} run --teacher-temperature -1"),
    Command("a share of no teacher", "train.py --loader synthetic --teacher-weight 0.3"),
    Command("a temperature of no teacher", "train.py --loader synthetic --teacher-temperature 2"),
    Command("no checkpoint", "predict.py none.pt image.jpg --output-dir out"),
    Command("a folder without a checkpoint", "predict.py empty image.jpg --output-dir out"),
    Command("a checkpoint that was cut off", "predict.py cut.pt image.jpg --output-dir out"),
    Command("a checkpoint that is a pipe", "predict.py pipe.pt image.jpg --output-dir out"),
    Command("weights of another architecture", "predict.py arch.pt image.jpg --output-dir out"),
    Command("no source", "predict.py run --output-dir out"),
    Command("a source that is not there", "predict.py run none.jpg --output-dir out"),
    Command("a pattern without a match", "predict.py run 'none-*.jpg' --output-dir out"),
    Command("a folder without images", "predict.py run empty --output-dir out"),
    Command("a compressed tar", "predict.py run images.tar.gz --output-dir out"),
    Command("a shard without images", "predict.py run none.tar --output-dir out"),
    Command("images and shards", "predict.py run image.jpg none.tar --output-dir out"),
    Command("a format without an output folder", "predict.py run image.jpg --format jsonl"),
    Command("the output folder is a file", "predict.py run image.jpg --output-dir image.jpg"),
    Command("a folder where a file would be written", "predict.py run image.jpg --output-dir results"),
    Command("embeddings without an output folder", "predict.py run image.jpg --output-type embedding"),
    Command("embeddings as a CSV", f"{_PREDICT} --output-type embedding --format csv"),
    Command("probabilities as an array", f"{_PREDICT} --format npy"),
    Command("no class", f"{_PREDICT} --topk 0"),
    Command("an unknown format", f"{_PREDICT} --format xml"),
    Command("an unknown output", f"{_PREDICT} --output-type softmax"),
    Command("no image per batch", f"{_PREDICT} --batch-size 0"),
    Command("no thread", f"{_PREDICT} --workers 0"),
    Command("an unknown device", f"{_PREDICT} --device tpu"),
    Command("no moving average", f"{_PREDICT} --ema"),
    Command("no probability", f"{_PREDICT} --min-prob 1.5"),
    Command("a negative probability", f"{_PREDICT} --min-prob -0.1"),
    Command("a probability that is no number", f"{_PREDICT} --min-prob nan"),
    Command("a word for a probability", f"{_PREDICT} --min-prob high"),
    Command("a probability beside logits", f"{_PREDICT} --min-prob 0.5 --output-type logit"),
    Command("a probability of several labels", "predict.py several.pt image.jpg --min-prob 0.5"),
    Command("a class with the name of no answer", "predict.py unknown.pt image.jpg --min-prob 0.5"),
    Command("a temperature that is none", "predict.py cold.pt image.jpg"),
    Command("a temperature that is none", "export.py cold.pt --format onnx --output-dir out"),
    Command("a temperature of several labels", "predict.py several.pt image.jpg --calibrate"),
    Command("a temperature for a resume", "predict.py last.pt image.jpg --calibrate"),
    Command("a temperature of images without a class", "predict.py run image.jpg --calibrate"),
    Command("a temperature with mirror images", "predict.py run image.jpg --calibrate --eval-flip"),
    Command("a temperature and answers", "predict.py run image.jpg --calibrate --min-prob 0.5"),
    Command("a temperature and a format", f"{_PREDICT} --calibrate --format jsonl"),
    Command("a temperature and an output", "predict.py run image.jpg --calibrate --output-type logit"),
    Command("no heat map", f"{_PREDICT} --heatmap 0"),
    Command("a negative number of heat maps", f"{_PREDICT} --heatmap -1"),
    Command("half a heat map", f"{_PREDICT} --heatmap 1.5"),
    Command("heat maps without an output folder", "predict.py run image.jpg --heatmap 1"),
    Command("heat maps and embeddings", f"{_PREDICT} --heatmap 1 --output-type embedding"),
    Command("heat maps and a temperature", f"{_PREDICT} --heatmap 1 --calibrate"),
    Command("a file with the name of the heat maps", "predict.py run image.jpg --heatmap 1 --output-dir drawn"),
    Command("heat maps of a network without a map", "predict.py pit.pt image.jpg --heatmap 1 --output-dir out"),
    Command("heat maps of weights that do not fit", "predict.py arch.pt image.jpg --heatmap 1 --output-dir out"),
    Command("no checkpoint", "export.py none.pt --format onnx --output-dir out"),
    Command("a folder without a checkpoint", "export.py empty --format onnx --output-dir out"),
    Command("a checkpoint that was cut off", "export.py cut.pt --format onnx --output-dir out"),
    Command("text", "export.py text.pt --format onnx --output-dir out"),
    Command("bare weights", "export.py weights.pt --format onnx --output-dir out"),
    Command("another version's checkpoint", "export.py format.pt --format onnx --output-dir out"),
    Command("a part of the checkpoint is missing", "export.py part.pt --format onnx --output-dir out"),
    Command("another number of classes", "export.py head.pt --format onnx --output-dir out"),
    Command("an unknown format", f"{_EXPORT} --format tflite"),
    Command("timm's files in float16", f"{_EXPORT} --format timm --half"),
    Command("timm's network of uint8", f"{_EXPORT} --format timm --input uint8"),
    Command("no moving average", f"{_EXPORT} --format pt2 --ema"),
    Command("no images to compare on", f"{_EXPORT} --format pt2 --check-data gone"),
    Command("images, but no comparison", f"{_EXPORT} --format pt2 --check-data . --no-check"),
    Command("ONNX for the hub", f"{_EXPORT} --format onnx --push me/net"),
    Command("int8 for torch", f"{_EXPORT} --format pt2 --int8"),
    Command("int8 for timm", f"{_EXPORT} --format timm --int8"),
    Command("int8 and float16", f"{_EXPORT} --format onnx --int8 --half"),
    Command("int8 of a run on synthetic images", f"{_EXPORT} --format onnx --int8"),
    Command("int8 without the images of the run", "export.py a1 --output-dir out --format onnx --int8"),
    Command("images that are not there", f"{_EXPORT} --format onnx --int8 --data-dir gone"),
    Command("no training images", f"{_EXPORT} --format onnx --int8 --data-dir half"),
    Command("int8 with images of other classes", f"{_EXPORT} --format onnx --int8 --data-dir animals"),
    Command("training images for the validation, too", f"{_EXPORT} --format onnx --int8 --data-dir colors"),
    Command("a negative loss", f"{_EXPORT} --format onnx --int8 --max-loss -1"),
    Command("a loss that is no number", f"{_EXPORT} --format onnx --int8 --max-loss much"),
    Command("a loss without int8", f"{_EXPORT} --format onnx --max-loss 2"),
    Command("images of the run without int8", f"{_EXPORT} --format onnx --data-dir animals"),
    Command("a folder that cannot be made", "export.py run --format pt2 --output-dir /proc/out"),
    Command("an exported network is there", "export.py run --format timm --output-dir exported"),
    Command("the folder of a run", "export.py run --format timm --output-dir run --overwrite"),
    Command("no run", "find_label_errors.py none --output-dir out"),
    Command("no output folder", "find_label_errors.py a1 a2"),
    Command("a run without a fold", "find_label_errors.py run --output-dir out"),
    Command("a missing fold", "find_label_errors.py a1 --output-dir out"),
    Command("a fold twice", "find_label_errors.py a1 again --output-dir out"),
    Command("another number of parts", "find_label_errors.py a1 third --output-dir out"),
    Command("another data set", "find_label_errors.py a1 moved --output-dir out"),
    Command("other classes", "find_label_errors.py a1 others.pt --output-dir out"),
    Command("several labels an image", "find_label_errors.py a1 several --output-dir out"),
    Command("no embeddings", "probe.py none val"),
    Command("a folder without embeddings", "probe.py train empty"),
    Command("no file of embeddings", "probe.py train image.jpg"),
    Command("embeddings without what is known of them", "probe.py alone val"),
    Command("more features than rows", "probe.py long val"),
    Command("features that are not finite", "probe.py train nan"),
    Command("another width", "probe.py train wide"),
    Command("another checkpoint", "probe.py train later"),
    Command("no class is known", "probe.py train unlabeled"),
    Command("one class", "probe.py single val"),
    Command("one file twice", "probe.py train train"),
    Command("no similarity", "probe.py train val --threshold 0"),
    Command("a page without an output folder", "probe.py train val --report"),
    Command("the output folder is a file", "probe.py train val --output-dir image.jpg"),
    Command("no run", "report.py none"),
    Command("no output folder", "report.py empty"),
    Command("a damaged line", "report.py cut"),
    Command("a page in a folder that is not there", "report.py run --output no/page.html"),
    Command("no run", "watch.py none"),
    Command("no time between two looks", "watch.py run --interval 0"),
    Command("no tracker", "track.py run --track none"),
    Command("an unknown tracker", "track.py run --track clearml"),
    Command("an unknown data set", "download.py food --output-dir out"),
    Command("an unknown size", "download.py imagenette --size 64 --output-dir out"),
    Command("no address", "download.py imagenette --url a.tgz --output-dir out"),
    Command("an archive that is not there", "download.py imagenette --url file:///none.tgz --output-dir out"),
    Command("a folder with other files", "download.py imagenette --output-dir mine"),
    Command("a folder that cannot be made", "download.py imagenette --output-dir /proc/a/b"),
]
