"""Every flag whose effect depends on the device or on several processes, once on a GPU and once on two."""

import math
import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import TINY, write_data
from tests.forked import launch_series, run_train
from tests.harness import ROOT, Finished, error_line, read_losses, start
from utils.options.config import flag_fields
from utils.options.flags import flag

# Read neither with the device nor with the number of processes, or by rank 0 alone; and dali-plugin, which is compiled.
ON_ANY_DEVICE = """
    output-dir name batch-size image-size val-data train-split val-split class-names stage-dir crop-scale hflip
    num-classes momentum weight-decay lr-scaling warmup-epochs schedule min-lr cooldown-epochs decay-epochs decay-rate
    label-smoothing eval-every keep log-steps tensorboard track track-project track-checkpoint config dali-plugin
"""

# Words of a run of two epochs of two epochs on one GPU.
ON_A_GPU = (
    "--loader torch --color-jitter 0.3 --augment three-augment",
    "--loader proxy --workers 2",
    "--loader stock --decode full --augment randaugment --randaugment-magnitude 21 --randaugment-ops 1",
    "--loader synthetic",
    "--cache host --prefetch 1 --randaugment-std 1.5 --augment randaugment",
    "--cache gpu --interpolation bicubic --val-image-size 40 --val-resize 46 --balance 1",
    "--decode full --hw-decoder-load 0.9 --interpolation random --val-crop squash",
    "--repeated-augmentation 3 --transform TRANSFORM",
    "--train-crop pad --vflip 0.5 --rot90",
    "--image-size 32x64 --cache gpu --vflip 0.5 --compile",
    "--image-size 32x64 --train-crop center --resize-schedule 0:32x64,1:64x32",
    "--cache gpu --train-crop squash --vflip 0.5 --rot90",
    "--augment-schedule 0:none,1:trivialaugment --resize-schedule 0:32,1:48",
    "--resize-schedule 0:32,1:48 --compile",
    "--mixup 0.2 --cutmix 1 --mixup-off-epoch 1 --random-erase 0.5 --class-weights auto --focal 2",
    "--arch test_vit --layer-decay 0.7 --optimizer adamw --lr 0.001",
    "--model-args global_pool=max --optimizer-args eps=1e-6 --optimizer lamb --lr 0.01",
    "--optimizer lion --lr 0.001 --drop-path 0.1 --drop-rate 0.1",
    "--optimizer adan --lr 0.001 --ema-decay 0.9 --head-lr-scale 2 --best-by macro_recall --balance 0.5",
    "--optimizer rmsproptf --lr 0.001 --bce-loss --bce-target-thresh 0.2 --class-weights auto",
    "--optimizer nadamw --lr 0.001 --grad-accum-steps 2",
    "--optimizer muon --lr 0.02 --grad-accum-steps 2 --clip-grad 1",
    "--amp none --compile --fused-layers",
    "--amp fp16 --compile --fused-layers --clip-grad 1 --ema-decay 0.9",
    "--amp bf16 --compile --no-fused-layers --grad-accum-steps 2",
    "--no-compile --fused-layers --grad-checkpointing",
    "--no-compile --no-cuda-graph --sync-bn",
    "--compile --no-cuda-graph --deterministic",
    "--freeze-epochs 1 --pretrained WEIGHTS --pretrained-head new --compile",
    "--pretrained WEIGHTS --pretrained-ema --pretrained-head keep",
    "--max-bad-steps 0 --patience 1 --time-limit 10000 --timeout 60 --seed 3",
    "--report --val-fraction 0.2 --train-data photos.csv --val-group group --balance 0.5 --class-weights auto",
    "--bad-files skip --report --cutmix 1 --compile",
    "--fold 2/4 --cache gpu --report",
    "--task multilabel --loss asymmetric --mixup 0.2 --report --compile --fused-layers --amp fp16",
    "--task multilabel --cache gpu --ema-decay 0.9 --class-weights auto",
    "--teacher WEIGHTS --compile --mixup 0.2 --ema-decay 0.9",
    "--teacher WEIGHTS --compile --loader torch --workers 2",
    "--arch resnet10t --teacher WEIGHTS --teacher-temperature 2 --amp fp16 --compile --fused-layers",
    "--arch resnet10t --teacher WEIGHTS --amp none --resize-schedule 0:32,1:48 --grad-accum-steps 2 --compile",
    "--teacher WEIGHTS --teacher-weight 0.9 --no-cuda-graph --grad-checkpointing",
    "--device cpu",
    "--device cuda:0 --processes 1",
)

# The same on two GPUs.
ON_TWO = (
    "--teacher WEIGHTS --grad-exchange ddp --compile --resize-schedule 0:32,1:48",
    "--arch resnet10t --teacher WEIGHTS --grad-exchange flat --amp fp16 --sync-bn",
    "--teacher WEIGHTS --grad-exchange ddp --freeze-epochs 1 --pretrained WEIGHTS --pretrained-head new",
    "--task multilabel --mixup 0.2 --compile",
    "--grad-exchange ddp --grad-compression bf16 --clip-grad 1 --ema-decay 0.9 --cutmix 1 --random-erase 0.5",
    "--grad-exchange flat --grad-compression bf16 --clip-grad 1 --amp fp16 --mixup 0.2 --focal 1 --class-weights auto",
    "--grad-exchange ddp --grad-accum-steps 2 --compile --amp fp16",
    "--grad-exchange flat --grad-accum-steps 2 --max-bad-steps 0",
    "--grad-exchange flat --optimizer muon --lr 0.02 --clip-grad 1",
    "--grad-exchange ddp --optimizer muon --lr 0.02",
    "--grad-exchange ddp --freeze-epochs 1 --pretrained WEIGHTS --pretrained-head new --resize-schedule 0:32,1:48",
    "--grad-exchange flat --freeze-epochs 1 --pretrained WEIGHTS --pretrained-head new --compile",
    "--grad-exchange ddp --compile --resize-schedule 0:32,1:48 --augment-schedule 0:none,1:trivialaugment",
    "--grad-exchange ddp --no-cuda-graph --drop-path 0.3 --drop-rate 0.2 --loss bce",
    "--grad-exchange ddp --grad-checkpointing --no-fused-layers --amp none",
    "--grad-exchange flat --deterministic --no-cuda-graph --optimizer adamw --lr 0.001 --seed 3",
    "--sync-bn --grad-exchange ddp --ema-decay 0.9 --amp fp16",
    "--sync-bn --grad-exchange flat --resize-schedule 0:32,1:48 --compile",
    "--sync-bn --grad-checkpointing --no-cuda-graph",
    "--sync-bn --freeze-epochs 1 --pretrained WEIGHTS --pretrained-ema",
    "--loader stock --decode full",
    "--loader torch --repeated-augmentation 3 --color-jitter 0.3 --augment three-augment",
    "--loader proxy --prefetch 1 --balance 0.5 --best-by macro_f1",
    "--loader synthetic --overwrite --resume none",
    "--cache gpu --hw-decoder-load 0.9",
    "--cache gpu --train-crop center --vflip 0.5 --rot90",
    "--cache host --transform TRANSFORM --val-fraction 0.2 --bad-files skip",
    "--cache gpu --val-fraction 0.2 --train-data photos.csv --val-group group --balance 1 --class-weights auto",
    "--fold 1/3 --bad-files skip",
    "--report --patience 1 --time-limit 10000 --timeout 60 --interpolation random --val-crop squash",
    "--device cpu",
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 images for training, and 41."""
    return write_data(tmp_path_factory.mktemp("data"), train=(32, 32, 32))


@pytest.fixture(scope="module")
def train_alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without val/, from which `--val-fraction` takes its images, and a label file with weights and groups."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train").symlink_to(images / "train")
    paths = sorted((folder / "train").glob("*/*.jpg"))
    rows = [
        f"train/{path.parent.name}/{path.name},{path.parent.name},{1 + at % 3},g{at // 2}"
        for at, path in enumerate(paths)
    ]
    (folder / "photos.csv").write_text("\n".join(["file,label,weight,group", *rows]))
    return folder


@pytest.fixture(scope="module")
def weights(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a moving average."""
    folder = tmp_path_factory.mktemp("weights")
    done = run_train(*flags_for(images, "--device cpu --epochs 1 --ema-decay 0.9"), "--output-dir", folder)
    assert done.status == 0, done.err
    return folder / "last.pt"


def flags_for(data: Path, text: str, weights: Path = Path()) -> list[object]:
    """Two epochs on a GPU, with the flags of `text`."""
    tiny = [word if word != "cpu" else "cuda" for word in TINY]
    transform = f"{ROOT}/examples/transform.py:grayscale_and_blur"
    words = text.replace("WEIGHTS", str(weights)).replace("TRANSFORM", transform).split()
    source = [] if "synthetic" in words else ["--data-dir", data]
    return [*source, *tiny, "--batch-size", 4, "--epochs", 2, *words]


def check(done: Finished, output: Path) -> None:
    assert done.status == 0, done.err
    losses = [loss for _, loss in read_losses(output)]
    assert len(losses) > 1
    assert all(map(math.isfinite, losses))


def test_every_flag_has_its_place() -> None:
    text = " ".join([*ON_A_GPU, *ON_TWO, Path(__file__).read_text().partition("@pytest")[2]])
    run = set(re.findall(r"--(?:no-)?([a-z][a-z0-9-]*)", text))
    names = {flag(field.name).removeprefix("--") for field in flag_fields()}
    assert names - run - set(ON_ANY_DEVICE.split()) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("text", ON_A_GPU)
def test_on_a_gpu(images: Path, train_alone: Path, weights: Path, tmp_path: Path, text: str) -> None:
    data = train_alone if "--val-fraction" in text else images
    done = run_train(*flags_for(data, text, weights), "--output-dir", tmp_path)
    check(done, tmp_path)
    assert ("batch norm's sums in cuDNN's convolutions" in done.out) is (
        {"fp16", "--compile", "--fused-layers"} <= {*text.split()}
    )


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.dist
@pytest.mark.parametrize("text", ON_TWO)
def test_on_two(images: Path, train_alone: Path, weights: Path, tmp_path: Path, text: str) -> None:
    data = train_alone if "--val-fraction" in text else images
    check(run_train(*flags_for(data, text, weights), "--output-dir", tmp_path, processes=2), tmp_path)


@pytest.mark.gpu
def test_a_checkpoint_goes_from_one_device_to_another(images: Path, tmp_path: Path) -> None:
    cpu, gpu, back = (tmp_path / name for name in ("cpu", "gpu", "back"))
    accepted = ("--accept-changes", "--resume")
    first, refused, changed, returned, flipped = launch_series(
        (*flags_for(images, "--device cpu --epochs 1"), "--output-dir", cpu),
        (*flags_for(images, ""), "--output-dir", cpu),
        (*flags_for(images, ""), *accepted, cpu / "last.pt", "--output-dir", gpu),
        (*flags_for(images, "--device cpu --epochs 3"), *accepted, gpu / "last.pt", "--output-dir", back),
        (*flags_for(images, "--evaluate --eval-flip"), "--output-dir", back),
    )
    assert refused.status == 2
    assert "device" in error_line(refused)
    for done in (first, changed, returned, flipped):
        assert done.status == 0, done.err


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.dist
def test_evaluation_on_two(images: Path, weights: Path, tmp_path: Path) -> None:
    answers = tmp_path / "real.csv"
    answers.write_text("file,label\n" + "".join(f"{path.name},red|blue\n" for path in (images / "val").rglob("*.jpg")))
    text = f"--evaluate --eval-flip --eval-classes present --real-labels {answers} --pretrained WEIGHTS"
    words = flags_for(images, text, weights)
    done = run_train(*words, "--output-dir", tmp_path, processes=2)
    assert done.status == 0, done.err


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.dist
def test_processes_of_its_own_start_again(images: Path, tmp_path: Path) -> None:
    text = "--processes auto --max-restarts 1 --checkpoint-steps 1 --epochs 60"
    with start(*flags_for(images, text), "--output-dir", tmp_path) as started:
        started.wait_for((tmp_path / "last.pt").exists)
        os.kill(started.ranks()[1], signal.SIGKILL)
        started.wait_for(lambda: "resumed at epoch" in started.out)
        started.send(signal.SIGTERM, started.pid)
        assert started.end().status == 143


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.dist
def test_a_stopped_rank_is_named_on_two(images: Path, tmp_path: Path) -> None:
    with start(*flags_for(images, "--timeout 15 --epochs 100000"), "--output-dir", tmp_path, processes=2) as started:
        started.wait_for(lambda: "step 2/" in started.out)
        os.kill(started.ranks()[1], signal.SIGSTOP)
        done = started.end()
    assert "rank 1 (process " in error_line(done)
    assert "is stopped (SIGSTOP)" in error_line(done)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.dist
def test_gradients_that_overflow_end_both(images: Path, tmp_path: Path) -> None:
    text = "--amp fp16 --arch test_convnext --lr 1e6 --max-bad-steps 1000 --epochs 20"
    done = run_train(*flags_for(images, text), "--output-dir", tmp_path, processes=2)
    assert done.status == 1
    assert "fp16 gradients overflow at any scale of the loss; use --amp bf16" in error_line(done)
