"""Other trainers' names for what flags do, for messages alone: who types one reads the name that it has here."""

import os
import re
from collections.abc import Collection, Sequence
from itertools import pairwise

PAGE = "docs/coming-from.md"  # lists all of them

_RATE = "--lr, for a global batch of 256 images (--lr-scaling none takes the rate as it is)"
_EMA = "--ema-decay, which is off without a value; timm's default is 0.9998"
_RANDAUGMENT = "rand-m9-mstd0.5 is --augment randaugment --randaugment-magnitude 27 --randaugment-std 1.5"

# What they write, without dashes and with - for _ -> what it is here. Several names of one thing stand in one key.
_ANSWERS = {
    # where the images are, and how they are read
    "data data-path data-root dataset-dir root train-dir": "--data-dir",
    "dataset": "found from the files in --data-dir",
    "class-map": "--class-names",
    "img-size imgsz input-size train-crop-size crop-size resolution": "--image-size",
    "val-crop-size": "--val-image-size",
    "val-resize-size": "--val-resize",
    "crop-pct": "--val-resize, in pixels: the image size divided by that share",
    "train-interpolation": "--interpolation",
    "mean std": "taken from the weights of --pretrained, else ImageNet's",
    "j num-workers": "--workers",
    "pin-mem channels-last": "always on; leave it out",
    "cache": "--cache host for memory, gpu, none or auto",
    "task": "found from the labels; --task multiclass or multilabel",
    "mode": "left out to train; --evaluate evaluates",
    # the network
    "model network backbone": "--arch",
    "model-kwargs": "--model-args NAME=VALUE,...",
    "gp drop-block bn-momentum bn-eps": "an argument in --model-args, such as global_pool=max",
    "in-chans channels": "always 3, of 8 bits: gray images become three equal ones",
    "initial-checkpoint pretrained-path weights checkpoint": "--pretrained FILE",
    "nb-classes nc": "--num-classes",
    "drop dropout": "--drop-rate",
    "drop-connect drop-path-rate": "--drop-path",
    "torchcompile torchscript": "--compile",
    # the optimizer and its rate
    "b batch bs train-batch-size": "--batch-size, images per process and step",
    "validation-batch-size": "--batch-size, for both",
    "accumulate accumulate-grad-batches gradient-accumulation-steps": "--grad-accum-steps",
    "opt": "--optimizer",
    "opt-eps opt-betas opt-kwargs": "--optimizer-args eps=1e-6,betas=[0.9,0.95]",
    "learning-rate lr lr0 lr-base base-lr": _RATE,
    "lr-base-scale": "--lr-scaling",
    "lr-base-size": "always 256 images; see --lr-scaling",
    "lrf": "--min-lr, a rate, not a share of --lr",
    "lr-min": "--min-lr, for 256 images like --lr",
    "wd decay": "--weight-decay, for all weights but biases and 1-D ones",
    "norm-weight-decay bias-weight-decay": "always 0; --weight-decay is for the other weights",
    "sched lr-scheduler": "--schedule cosine, linear, step or constant",
    "cos-lr": "--schedule cosine, the default",
    "lr-warmup-epochs": "--warmup-epochs",
    "warmup-lr lr-warmup-decay": "1/W of the rate, for a warmup of W steps; see --warmup-epochs",
    "lr-warmup-method": "always linear; see --warmup-epochs",
    "lr-step-size": "--decay-epochs, with --schedule step",
    "lr-gamma": "--decay-rate, with --schedule step",
    "num-epochs max-epochs n-epochs": "--epochs",
    "patience-epochs decay-milestones": "of a schedule that is not here; see --schedule",
    "early-stopping": "--patience, in evaluations",
    "clip-grad-norm gradient-clip-val": "--clip-grad, a norm",
    "clip-mode gradient-clip-algorithm": "always the norm; see --clip-grad",
    "smoothing label-smooth": "--label-smoothing",
    "kd-model-name teacher-model teacher-path": "--teacher, a run, a file or a name of timm's",
    "kd-temperature distillation-tau": "--teacher-temperature",
    "distill-loss-weight task-loss-weight distillation-alpha": "--teacher-weight, the teacher's share of the loss",
    "kd-distill-type kd-loss-type distillation-type": "always the logits, by KL divergence; see --teacher",
    "model-ema ema model-ema-decay": _EMA,
    "model-ema-steps": "always 1; see --ema-decay",
    "freeze": "--freeze-epochs, all layers but the head",
    "dist-bn": "always averaged before an evaluation",
    "sync-batchnorm": "--sync-bn",
    # augmentation
    "aa auto-augment": f"--augment, where {_RANDAUGMENT}",
    "ra-magnitude": "--randaugment-magnitude",
    "aug-repeats ra-reps": "--repeated-augmentation",
    "ra-sampler": "--repeated-augmentation 3",
    "reprob erasing": "--random-erase, the probability",
    "remode recount": "always one rectangle of the mean color; see --random-erase",
    "mixup-alpha": "--mixup",
    "cutmix-alpha": "--cutmix",
    "scale": "--crop-scale, the smallest area",
    "fliplr": "--hflip",
    "flipud": "--vflip",
    "degrees": "--rot90, quarter turns",
    "hsv-h hsv-s hsv-v": "--color-jitter, of brightness, contrast and saturation",
    "no-aug": "--train-crop center --hflip 0",
    # precision and processes
    "amp use-amp": "--amp auto, the default",
    "amp-dtype precision half": "--amp bf16 or fp16",
    "device accelerator": "--device auto, cuda, cuda:N or cpu; several GPUs are --processes N",
    "gpus gpu devices num-gpus ngpus world-size": "--processes N, or auto for all GPUs",
    "local-rank dist-url dist-backend strategy": "set by --processes, torchrun or Slurm",
    "num-nodes nnodes": "torchrun's --nnodes, in front of train.py",
    "use-deterministic-algorithms": "--deterministic",
    # the run
    "output out save-dir log-dir default-root-dir project": "--output-dir",
    "experiment exp-name run-name": "--name",
    "exist-ok": "never needed: the same command goes on; --resume none --overwrite begins again",
    "resume": "--resume auto (the default), none or the PATH of a checkpoint",
    "ckpt-path": "--resume PATH",
    "start-epoch": "known from the checkpoint; leave it out",
    "test-only validate eval": "--evaluate",
    "eval-metric": "--best-by",
    "tta": "--eval-flip, with --evaluate",
    "log-interval print-freq log-every-n-steps": "--log-steps",
    "recovery-interval save-period save-every": "--checkpoint-steps",
    "check-val-every-n-epoch val-check-interval val-interval": "--eval-every, in epochs",
    "log-wandb": "--track wandb",
    "wandb-project": "--track-project",
    "plots": "--report",
    "seed-everything": "--seed",
    "time max-time": "--time-limit, in seconds",
    "c cfg": "--config",
}
# Flags that are here, too -> what values of others mean.
VALUES = {"amp": "a bare --amp is --amp auto here, the default", "augment": _RANDAUGMENT}
ALIASES = {name: answer for names, answer in _ANSWERS.items() for name in names.split()}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_VALUE_OF = {"true": "", "yes": "", "false": "no-", "no": "no-"}  # of a switch -> what its flag begins with


def explain(words: Sequence[str], flags: Collection[str]) -> str:
    """What unknown words of a command line are called here: `--model is --arch; imgsz=64 is --image-size 64`.

    Args:
        words: what is left of the command line, in its order: names that the program does not have, each perhaps with
            the word after it, and words that belong to no flag.
        flags: that the program has.

    Returns:
        "" where no word is known.
    """
    answers = {word: _answer(word, before, flags) for before, word in pairwise(["", *words])}
    return "; ".join(f"{word} is {answer}" for word, answer in answers.items() if answer)


def alias_of(name: str, flags: Collection[str]) -> str:
    """What another trainer's name is called here, "" if that is not known; `trainer.max_epochs` is like max-epochs."""
    name = name.lstrip("-").rpartition(".")[2].replace("_", "-").lower()
    answer = ALIASES.get(name) or (f"--{name}" if f"--{name}" in flags else "")
    return answer if {*FLAG.findall(answer)} - {"--nnodes"} <= set(flags) else ""


def _answer(word: str, before: str, flags: Collection[str]) -> str:
    name, equals, value = word.partition("=")
    if not equals and not word.startswith("-"):
        is_value = before.startswith("-") and "=" not in before
        is_data = "--data-dir" in flags and ("/" in word or os.path.isdir(word))
        return f"--data-dir {word}" if is_data and not is_value else ""
    answer = alias_of(name, flags)
    if not FLAG.fullmatch(answer) or not value:
        return answer
    if value.lower() not in _VALUE_OF:
        return f"{answer} {value}"
    switch = f"--{_VALUE_OF[value.lower()]}{answer[2:]}"
    return switch if switch in flags else answer
