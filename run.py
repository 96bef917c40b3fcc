"""Run: everything that a training loop holds in its hands, put together from the flags, the data and the checkpoint."""

import collections
import contextlib
import dataclasses
import errno
import fcntl
import inspect
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import PIL
import timm
import torch
import torchvision
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import models
import pipelines
from utils import checkpoint, dataset
from utils.augment import BatchAugment, Normalize
from utils.checkpoint import RunRecord
from utils.compiler import compile_network
from utils.config import TrainConfig, flag, require_data, validate
from utils.dataset import FileEntry, Manifest
from utils.distributed import DistEnv, broadcast, broadcast_weights, connect, diverged_parameters, gather, together
from utils.errors import RunFailed, UserError
from utils.gradients import CapturedGradients, FlatAllReduce, Gradients, on_stream, recording_stream
from utils.inspection import BAD_FILES, bad_files, compare_contents, content_digests, load_digests, survey
from utils.launcher import restarted_by
from utils.layers import accelerate
from utils.layout import Layout, choose_batch_size, layout_of, saved_layout
from utils.log import Log, speak
from utils.machine import FeedChoice, joined_by_nvlink
from utils.metrics import Meter
from utils.optim import create_ema, create_optimizer, create_schedule, describe_ema, rate_at, scaled_lr
from utils.sampler import Sampler
from utils.seed import make_deterministic, seed_process, seed_weights, set_random_state
from utils.state import TrainState, share_out
from utils.stop import StopRequest

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": torch.float32}
LOCK_SECONDS = 10.0
LR_JUMP = 0.01  # share of the learning rate by which a resume may change it without a warning
SUMMARY = "summary.json"
EVALUATION = "evaluation.json"
OUTPUTS = ("config.json", "metrics.jsonl", "last.pt", "best.pt", SUMMARY, EVALUATION)
# What decides the result of an evaluation, and how much of it fits into memory.
EVALUATION_FLAGS = (
    "data_dir", "arch", "num_classes", "loader", "image_size", "val_resize", "amp", "batch_size", "hw_decoder_load",
)  # fmt: skip
PROBE_BYTES = 100_000  # more than the small files take: a full disk is found before the run
SYNTHETIC_TRAIN, SYNTHETIC_VAL, SYNTHETIC_CLASSES = 128_000, 5_000, 1_000  # of --loader synthetic without --data-dir

# torch 2.15 renamed the option; 2.11 to 2.14 know the old name only.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


Splits = dict[str, Manifest]  # by the name of the split
Normalization = tuple[tuple[float, ...], tuple[float, ...]]


@dataclasses.dataclass
class Run:
    """What a training loop holds in its hands: the state that a checkpoint keeps, and the tools that it does not."""

    config: TrainConfig
    env: DistEnv
    state: TrainState
    gradients: Gradients | CapturedGradients
    schedule: CosineLRScheduler
    sampler: Sampler
    train_loader: pipelines.TrainLoader
    val_loader: pipelines.ValLoader
    num_val: int
    augment: BatchAugment
    amp_dtype: torch.dtype
    record: RunRecord
    origin: str  # of the first weights, or the checkpoint: for the start-up block
    changes: list[str]  # flags that differ from those of the checkpoint
    warnings: list[str]  # of a resume
    shared_before: Layout | None  # how the checkpoint's run shared a step, if not as this one
    log: Log
    stop: StopRequest
    kept: tuple[int, int] | None  # until `begin`: metrics.jsonl's records up to these epochs and steps stay
    replaced: list[Path]  # files of the output folder that `begin` removes
    seconds_to_first_step: float | None = None  # of this launch, from the start of the process
    unsaved: str | None = None  # why the last save failed; known to rank 0 alone

    @property
    def again(self) -> str:
        """What resumes this run."""
        if self.config.resume == "auto":
            return "the same command"
        without = " and without --overwrite" if self.config.overwrite else ""
        return f"the same command with --resume auto{without}"

    def begin(self) -> None:
        """Let the output folder be this run's, now that there is something to lose. A collective; does it once.

        metrics.jsonl ends where this launch began, config.json says how it runs, an earlier summary.json is gone, as is
        what `--overwrite` replaces.

        Raises:
            UserError: on all ranks, if rank 0 cannot write there.
        """
        if self.kept is None:
            return
        with together(self.env):
            try:
                self.log.rewind(*self.kept)
                if self.env.is_main:
                    for path in self.replaced:
                        path.unlink(missing_ok=True)
                    self.config.save(self.config.output_dir / "config.json")
                    (self.config.output_dir / SUMMARY).unlink(missing_ok=True)
            except OSError as error:
                raise UserError(
                    f"--output-dir {self.config.output_dir}: cannot be written ({error.strerror}); make room there"
                ) from error
        self.kept = None

    def save(self, is_best: bool = False) -> None:
        """Write last.pt (and best.pt) as of now; if that fails, say so and let the run go on. A collective.

        Weights that are not finite, or gave such a loss, are not worth the checkpoint before them. In fp16 the loss
        may be, as the scaler has skipped that step.

        Raises:
            RunFailed: on all ranks, if their weights are not the same, or running statistics are lost for good.
        """
        with self.state.meter.paused():
            self._check_ranks()
            self.unsaved = self._unfit()
            if self.unsaved is not None:
                self.log.say(f"warning: no checkpoint at step {self.state.step}: {self.unsaved}; the one before stands")
                return
            self._check_statistics()
            loader = self.train_loader.state()
            self.unsaved = checkpoint.save(self.state, loader, self.config, self.record, is_best)
        if self.unsaved is not None:
            self.log.say(
                f"warning: no checkpoint at step {self.state.step} ({self.unsaved}); make room in "
                f"{self.config.output_dir}: the next save tries again"
            )

    def _check_ranks(self) -> None:
        diverged = diverged_parameters(self.state.model, self.env)
        if diverged:
            rank, names = next(iter(diverged.items()))
            ranks = ", ".join(map(str, diverged))
            raise RunFailed(
                f"at step {self.state.step}: the weights of rank {ranks} are no longer those of rank 0 ({names[0]} and "
                f"{len(names) - 1} more on rank {rank}), which points to a faulty GPU or memory; nothing was saved "
                f"since the last checkpoint, which {self.again} resumes"
            )

    def _check_statistics(self) -> None:
        # Of batch norm: a forward pass that overflows leaves them so for ever, even if fp16's scaler skips the step, so
        # that evaluations alone would show it.
        statistics = [
            buffer
            for module in self.state.modules().values()
            for name, buffer in module.named_buffers()
            if name.endswith(("running_mean", "running_var"))
        ]
        finite = not statistics or bool(torch.stack([values.isfinite().all() for values in statistics]).all())
        if not all(gather(finite, self.env)):
            remedy = "use --amp bf16 or none" if self.config.amp == "fp16" else "lower --lr"
            raise RunFailed(
                f"at step {self.state.step}: running statistics are not finite, as activations overflowed; {remedy}; "
                "the last good checkpoint stands"
            )

    def _unfit(self) -> str | None:
        """Why the weights are not worth saving, the same on all ranks; None if they are."""
        if not self.state.scaler.is_enabled() and not self.state.meter.is_finite():
            return "the loss is not finite"
        norm = nn.utils.get_total_norm([value.detach() for value in self.state.model.parameters()])
        return None if norm.isfinite() else "the weights are not finite"


def read_data(config: TrainConfig) -> Splits:
    """List what the run reads: both splits, `--evaluate` val/ alone; synthetic data without --data-dir has any size."""
    names = ("val",) if config.evaluate else ("train", "val")
    if config.data_dir is None:
        sizes = {"train": SYNTHETIC_TRAIN, "val": SYNTHETIC_VAL}
        return {name: dataset.synthetic(sizes[name], config.num_classes or SYNTHETIC_CLASSES) for name in names}
    skip_bad = config.bad_files == "skip"
    if config.evaluate:
        return {"val": dataset.scan(config.data_dir, "val", skip_bad)}
    return dict(zip(names, dataset.scan_splits(config.data_dir, skip_bad), strict=True))


def leave_out_bad(config: TrainConfig, splits: Splits, env: DistEnv, saved: dict[str, Any]) -> Splits:
    """`--bad-files skip`: the manifests without the files that the loader cannot read. A collective.

    Every file is decoded once, by all ranks together; what was found is kept in the output folder, for the next launch
    to decode no more than what has changed. A run that began with files which are bad now, or without files which are
    good now, goes on as `without_later` says; `saved` is its checkpoint.

    Raises:
        UserError: on all ranks: a class would be left without images, or the output folder cannot be written.
    """
    if config.bad_files != "skip" or config.loader == "synthetic" or config.data_dir is None:
        return splits
    assert config.workers is not None, "resolved"
    entries = [
        FileEntry(f"{split}/{name}", int(size), int(mtime))
        for split, manifest in splits.items()
        for name, size, mtime in zip(manifest.files, manifest.sizes, manifest.mtimes, strict=True)
    ]
    entries += [FileEntry(f"{split}/{name}", 0, 0, bad) for split in splits for name, bad in splits[split].bad.items()]
    decoder = pipelines.decoder_of(config.loader)
    known = survey(
        config.data_dir.absolute(), entries, decoder, config.output_dir, config.workers, env, config.evaluate
    )
    bad = broadcast({} if known is None else bad_files(known), env)
    kept = {}
    for split, manifest in splits.items():
        of_split = {name[len(split) + 1 :]: reason for name, reason in bad.items() if name.startswith(f"{split}/")}
        kept[split] = manifest.without(of_split)
        if saved and not config.evaluate:
            kept[split] = without_later(manifest, kept[split], of_split, saved, split)
    return kept


def without_later(
    listed: Manifest, kept: Manifest, bad: Mapping[str, str], saved: dict[str, Any], split: str
) -> Manifest:
    """The images with which the run `saved` goes on: without `bad`, but in the order that it has begun with.

    Where files of train/ have turned bad since, others stand in for them. Those of val/ are left out. What the run has
    been without from its start stays left out, even if it is good now.

    Args:
        listed: all files.
        kept: those that are good now, which is the result if the run began with them.
        bad: relative to the split's folder, and why.
        saved: a checkpoint; if it is of another data set, so is the result.
        split: train or val.
    """
    begun = as_begun(listed, saved["left_out"][split], bad)
    if begun.fingerprint != saved["fingerprint"][f"files of {split}/"]:
        return kept
    if split == "train":
        return begun.with_stand_ins(bad)
    return dataclasses.replace(begun.without(bad), fingerprint=begun.fingerprint)


def as_begun(listed: Manifest, left_out: Sequence[str], bad: Mapping[str, str] | None = None) -> Manifest:
    """The images with which a run began that has been without the files `left_out`; `bad` has their reasons."""
    reasons = bad or {}
    return (
        listed.without({name: reasons.get(name, "bad when the run began") for name in left_out}) if left_out else listed
    )


def describe_skipped(config: TrainConfig, splits: Splits) -> str:
    """How many files were left out, in all and of each class; "" for none."""
    parts = []
    for split, manifest in splits.items():
        if manifest.bad:
            classes = collections.Counter(name.split("/")[0] for name in manifest.bad)
            counts = ", ".join(f"{name} {count:,}" for name, count in sorted(classes.items()))
            files = len(manifest) - len(manifest.stand_ins) + len(manifest.bad)
            parts.append(f"{len(manifest.bad):,} of {files:,} {split} files ({counts})")
        if manifest.stand_ins:
            bad, instead = next(iter(manifest.stand_ins.items()))
            parts.append(
                f"{len(manifest.stand_ins):,} of them turned bad after the run had begun: to keep its order, images of "
                f"the same class come twice ({instead} for {bad}, ...)"
            )
    return f"{'; '.join(parts)}: {config.output_dir / BAD_FILES}" if parts else ""


def check_files(config: TrainConfig, splits: Splits, env: DistEnv) -> None:
    """Raise UserError on all ranks unless all of them list the same files. A collective."""
    if len(set(gather(tuple(manifest.fingerprint for manifest in splits.values()), env))) > 1:
        raise UserError(
            f"--data-dir {config.data_dir}: not the same files on all ranks; give all the same", common=True
        )


def resolve(
    config: TrainConfig,
    classes: Sequence[str],
    env: DistEnv,
    feed: FeedChoice,
    saved: dict[str, Any] | None = None,
) -> TrainConfig:
    """Replace every `auto` and every absent value by what this machine, the data and the checkpoint `saved` make of it.

    Raises:
        UserError: on all ranks, for what does not fit the machine, the data or the checkpoint.
    """
    on_cuda = env.device.type == "cuda"
    num_classes = len(classes)
    amp = config.amp
    if amp == "auto":
        amp = "none"
        if on_cuda:
            all_can = all(gather(torch.cuda.is_bf16_supported(including_emulation=False), env))
            amp = "bf16" if all_can else "fp16"
    compiled = on_cuda if config.compile is None else config.compile
    if config.cuda_graph and not on_cuda:
        raise UserError("--cuda-graph without a GPU: there is none to launch it on; use --no-cuda-graph", common=True)
    if amp == "fp16" and not on_cuda:
        raise UserError("--amp fp16 without a GPU: the CPU has no fast float16; use --amp none or bf16", common=True)
    if config.num_classes is not None and config.num_classes < num_classes:
        raise UserError(
            f"--num-classes {config.num_classes}: fewer than the {num_classes} class folders; leave it out or raise it",
            common=True,
        )
    grad_exchange = config.grad_exchange
    if grad_exchange == "auto" and env.world_size > 1:
        grad_exchange = "flat" if joined_by_nvlink(env) else "ddp"
    return dataclasses.replace(
        config,
        batch_size=choose_batch_size(config, env, saved or {}),
        workers=feed.workers,
        amp=amp,
        grad_exchange=grad_exchange,
        decode=feed.decode,
        hw_decoder_load=feed.hw_decoder_load,
        cache=feed.cache,
        prefetch=feed.prefetch,
        device="cuda" if on_cuda else "cpu",
        num_classes=config.num_classes or num_classes,
        val_resize=config.val_resize or round(config.image_size * 8 / 7),
        compile=compiled,
        # Without a compiler what lies between the kernels is not fused, which costs more than they gain.
        fused_layers=on_cuda and compiled if config.fused_layers is None else config.fused_layers,
        cuda_graph=on_cuda and config.grad_accum_steps == 1 if config.cuda_graph is None else config.cuda_graph,
        warmup_epochs=resolve_warmup(config, saved or {}),
    )


def resolve_warmup(config: TrainConfig, saved: dict[str, Any]) -> float:
    """`--warmup-epochs`, else that of the checkpoint `saved`, else a tenth of the epochs, at most 5."""
    if config.warmup_epochs is not None:
        return config.warmup_epochs
    return float(saved["config"]["warmup_epochs"]) if saved else min(5, config.epochs / 10)


def prepare_output(config: TrainConfig, env: DistEnv) -> None:
    """Make the output folder and see that it can be written. A collective.

    Raises:
        UserError: on all ranks, if rank 0 cannot write there.
    """
    with together(env):
        if not env.is_main:
            return
        probe = config.output_dir / ".write-test"
        try:
            config.output_dir.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_bytes(bytes(PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)
            for name in OUTPUTS:
                if (config.output_dir / name).is_dir():
                    raise IsADirectoryError(errno.EISDIR, f"{name} in it is a folder")
        except OSError as error:
            raise UserError(
                f"--output-dir {config.output_dir}: cannot be written ({error.strerror}); give another"
            ) from error


def lock_output(config: TrainConfig, env: DistEnv, stack: contextlib.ExitStack) -> bool:
    """Keep other runs out of the output folder for as long as this process lives. A collective.

    The lock is the kernel's, on the folder itself: it leaves no file and ends with the process, however that ends.

    Returns:
        Whether it is locked, the same on all ranks; False if there is no such folder yet.

    Raises:
        UserError: on all ranks, if another run holds it for 10 seconds, more than the workers of a dead one live.
    """
    locked = env.is_main and os.path.isdir(config.output_dir)  # unlike Path.is_dir, False for what may not be looked at
    with together(env):
        if locked:
            _lock(config.output_dir, stack)
    return any(gather(locked, env))


def _lock(path: Path, stack: contextlib.ExitStack) -> None:
    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError:  # which `prepare_output` explains
        return
    stack.callback(os.close, folder)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output-dir {path}: another run is writing there; wait for its end or give another folder"
                ) from None
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return


def create_sampler(config: TrainConfig, manifest: Manifest, env: DistEnv) -> Sampler:
    """The order of the training images.

    Raises:
        UserError: fewer images than processes, or than one global batch.
    """
    sampler = Sampler(
        len(manifest), config.local_batch_size, config.grad_accum_steps, env.rank, env.world_size, config.seed
    )
    if len(manifest) < env.world_size:
        raise UserError(
            f"--data-dir {config.data_dir}: {len(manifest)} training images for {env.world_size} processes; "
            f"start at most {len(manifest)}",
            common=True,
        )
    if sampler.steps_per_epoch == 0:
        raise UserError(
            f"--batch-size {config.batch_size}: {env.world_size} processes x {config.batch_size} images x "
            f"{config.grad_accum_steps} batches is a global batch of {sampler.global_batch_size}, more than the "
            f"{len(manifest)} training images; lower it",
            common=True,
        )
    return sampler


def open_checkpoint(config: TrainConfig, env: DistEnv) -> tuple[Path | None, dict[str, Any]]:
    """The file that `--resume` means and its content; (None, {}) if there is none to use. A collective.

    Raises:
        UserError: on all ranks: missing, damaged, or not the same for all ranks.
    """
    path: Path | None = None
    saved: dict[str, Any] = {}
    skipped: list[str] = []
    if saved_before_restart(config, env):
        config = dataclasses.replace(config, resume="auto")
    with together(env):
        path, saved, skipped = checkpoint.load_newest(checkpoint.find(config))
    if env.is_main:
        for line in skipped:
            speak(line)
    found = gather((saved.get("step"), saved.get("epoch"), skipped), env)
    if len({(step, epoch) for step, epoch, _ in found}) > 1:  # an evaluation changes the epoch alone
        why = "".join(f"; rank {rank} {lines[0]}" for rank, (_, _, lines) in enumerate(found) if lines)
        raise UserError(
            f"--output-dir {config.output_dir}: not the same checkpoint on all ranks{why}; use a shared folder",
            common=True,
        )
    return path, saved


def saved_before_restart(config: TrainConfig, env: DistEnv) -> bool:
    """Whether this launch has left a checkpoint before torchrun or Slurm started it again. A collective.

    `--resume none` and `--resume PATH` say where a launch begins, not where each of its restarts does.
    """
    names = {name for of_rank in gather(restarted_by(), env) for name in of_rank}
    if not names or config.resume == "auto" or config.evaluate:
        return False
    saved: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # none of them is whole
        _, saved, _ = checkpoint.load_newest(checkpoint.find(dataclasses.replace(config, resume="auto")))
    return any(gather(not names.isdisjoint(saved.get("launchers", [])), env))


class Network(NamedTuple):
    """A network and what is known of its start.

    Attributes:
        model: on its device.
        normalization: mean and standard deviation per channel, of images in [0, 1].
        origin: where its weights are from, for the user.
        note: what an evaluation of these weights cannot know; mostly "".
    """

    model: nn.Module
    normalization: Normalization
    origin: str
    note: str = ""


def create_model(config: TrainConfig, env: DistEnv, classes: Sequence[str], saved: dict[str, Any]) -> Network:
    """The network, with the weights of `--pretrained` if the run begins. A collective.

    Those of the checkpoint `saved` come later; its normalization is used.

    Raises:
        UserError: on all ranks: no such weights, or a network that does not take such images.
    """
    assert config.num_classes is not None, "resolved"
    with together(env):  # weights may be missing on one machine
        model = models.create_model(config.arch, config.num_classes, image_size=config.image_size)
        network = Network(model, models.normalization(model), "from scratch")
        if config.pretrained is not None and not saved:
            network = load_pretrained(config, model, classes)
        network.model.train(not config.evaluate)
        models.check_input(network.model, config.arch, config.image_size, config.local_batch_size)
    if saved:
        network = network._replace(normalization=saved_normalization(saved))
    network.model.to(env.device)
    if config.fused_layers:
        accelerate(network.model)
    return network


def load_pretrained(config: TrainConfig, model: nn.Module, classes: Sequence[str]) -> Network:
    """`model`, or another one like it, with the weights of `--pretrained`."""
    assert config.num_classes is not None, "resolved"
    assert config.pretrained is not None
    published = config.pretrained == "timm"
    weights = (
        models.published_weights(config.arch)
        if published
        else models.read_weights(Path(config.pretrained), config.pretrained_ema)
    )
    origin, note, keep_head = f"{weights.kind} of {weights.source}", "", True
    if config.evaluate:
        note = models.check_head(weights, model, config.num_classes, classes)
    else:
        head = models.choose_head(weights, model, config.num_classes, classes, config.pretrained_head)
        origin, keep_head = f"{origin}, head {head.reason}", head.keep
    if not published:
        models.load_weights(model, config.arch, weights, config.num_classes, keep_head)
        return Network(model, weights.normalization or models.normalization(model), origin, note)
    model = models.create_model(config.arch, config.num_classes, True, config.image_size)
    if not keep_head:
        cast(Any, model).reset_classifier(config.num_classes)
    return Network(model, models.normalization(model), origin, note)


def saved_normalization(saved: dict[str, Any]) -> Normalization:
    """Mean and standard deviation per channel with which the run of a checkpoint trains."""
    channels = saved["normalization"]
    return tuple(channels["mean"]), tuple(channels["std"])


def distribute(model: nn.Module, config: TrainConfig, env: DistEnv, stream: torch.cuda.Stream | None) -> nn.Module:
    """`model`, compiled on request, within DDP if that exchanges the gradients; `stream` is where it will be recorded.

    DDP is compiled with the network, so that it is split where DDP's buckets end and their exchange begins early.
    """
    net = model
    if exchanges_by_ddp(config, env):
        # Running statistics stay with their rank and are averaged when they are needed; torch's default would
        # broadcast rank 0's at every step and forget the others.
        with on_stream(stream):
            net = DistributedDataParallel(
                model,
                device_ids=[env.device] if env.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **_KEEP_BUFFERS,
            )
        if config.grad_compression == "bf16":
            net.register_comm_hook(None, bf16_compress_hook)
    elif env.world_size > 1:
        broadcast_weights(model)
    connect(model, env)
    return compile_network(net) if config.compile else net


def exchanges_by_ddp(config: TrainConfig, env: DistEnv) -> bool:
    """Whether DDP exchanges the gradients of a resolved config, not `FlatAllReduce` and not nobody."""
    return env.world_size > 1 and config.grad_exchange == "ddp"


def create_gradients(
    config: TrainConfig, net: nn.Module, state: TrainState, stream: torch.cuda.Stream | None
) -> Gradients | CapturedGradients:
    """What a step does with a batch; with a `stream` to record on, as a CUDA graph."""
    criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    exchange = None
    if state.env.world_size > 1 and not exchanges_by_ddp(config, state.env):
        dtype = torch.bfloat16 if config.grad_compression == "bf16" else torch.float32
        exchange = FlatAllReduce(state.model.parameters(), dtype)
    gradients = Gradients(net, criterion, state.scaler, AMP_DTYPES[config.amp], config.grad_accum_steps, exchange)
    return gradients if stream is None else CapturedGradients(gradients, stream)


def settle_buckets(net: nn.Module, config: TrainConfig, env: DistEnv) -> None:
    """A pass of nothing through DDP, before a checkpoint is loaded over what it leaves behind.

    DDP lays its gradient buckets out anew after the first backward pass of a launch, and the rounding of a sum over
    three and more ranks depends on the layout: without this the first resumed step would differ in its last bits.
    """
    if not exchanges_by_ddp(config, env):
        return
    net.train()
    dtype, size = AMP_DTYPES[config.amp], config.image_size
    images = torch.zeros(config.local_batch_size, 3, size, size, dtype=dtype, device=env.device)
    with torch.autocast(env.device.type, dtype=dtype, enabled=dtype != torch.float32):
        loss = net(images.contiguous(memory_format=torch.channels_last)).sum()
    loss.backward()
    net.zero_grad(set_to_none=True)


def create_state(
    config: TrainConfig,
    sampler: Sampler,
    env: DistEnv,
    started: float,
    classes: Sequence[str],
    saved: dict[str, Any],
) -> tuple[TrainState, Network]:
    """Everything that a checkpoint keeps, as it is before the first step, and its network."""
    if config.deterministic:
        make_deterministic()
    else:
        torch.backends.cudnn.benchmark = True
    seed_weights(config.seed)
    network = create_model(config, env, classes, saved)
    model = network.model
    seed_process(config.seed, env.rank, step=0)
    state = TrainState(
        model=model,
        optimizer=create_optimizer(config, model, sampler.global_batch_size),
        scaler=GradScaler(env.device.type, enabled=config.amp == "fp16"),
        ema=create_ema(model, config.ema_decay) if config.ema_decay > 0 else None,
        meter=Meter(env),
        env=env,
        started=started,
    )
    return state, network


def restore(state: TrainState, net: nn.Module, saved: dict[str, Any], config: TrainConfig) -> dict[str, Any] | None:
    """Load the checkpoint `saved`, if there is one, into `state`; returns what this rank's loader continues from.

    In another layout that is nothing: the images follow from the step, and what is random about them is drawn anew.
    """
    if not saved:
        return None
    settle_buckets(net, config, state.env)
    ranks: list[dict[str, Any]] = saved["ranks"]
    if layout_of(config, state.env.world_size) == saved_layout(saved):
        own = ranks[state.env.rank]
        state.load(saved, own)
        set_random_state(own["random"], state.env.device)
        loader: dict[str, Any] = own["loader"]
        return loader
    state.load(saved, share_out(ranks, state.env.rank))
    seed_process(config.seed, state.env.rank, state.step)
    return None


def check_resume(
    path: Path, saved: dict[str, Any], fingerprint: dict[str, Any], config: TrainConfig, env: DistEnv
) -> None:
    """Raise UserError on all ranks unless the run is, on each, the one that was saved. A collective."""
    without = config.bad_files == "error" and any(saved["left_out"].values())
    hint = "give --bad-files skip, without whose bad files it ran, or " if without else ""
    with together(env):
        checkpoint.check_fingerprint(path, saved["fingerprint"], fingerprint, hint)


def history(path: Path | None, saved: dict[str, Any], config: TrainConfig, state: TrainState) -> tuple[int, int]:
    """Epochs and steps up to which metrics.jsonl in the output folder is of the run that `state` is. A collective.

    What `--resume PATH` goes on from may lie elsewhere, or before the best checkpoint of the folder: best.pt is then
    what is best from now on.
    """
    if path is None or config.resume == "auto":
        return state.epoch, state.step
    here = broadcast(os.path.realpath(path.parent) == os.path.realpath(config.output_dir), state.env)
    best = broadcast(state.env.is_main and checkpoint.has_best_of(saved, config.output_dir), state.env)
    if not (here and best):
        state.best_top1 = -1.0
    return (state.epoch, state.step) if here else (-1, -1)


def create_run(
    config: TrainConfig,
    splits: Splits,
    listed: Splits,
    env: DistEnv,
    stack: contextlib.ExitStack,
    stop: StopRequest,
    started: float,
    path: Path | None,
    saved: dict[str, Any],
) -> Run:
    """Build everything from the network to the loaders, from the checkpoint if there is one. A collective.

    Args:
        config: resolved.
        splits: what is trained and evaluated on.
        listed: the same with the files that `--bad-files skip` has left out.
        env: this process.
        stack: closes what was opened.
        stop: not armed.
        started: `time.perf_counter()` at the launch.
        path, saved: of `open_checkpoint`.

    Raises:
        UserError: on all ranks, for a checkpoint or a data set that does not fit.
    """
    train, val = splits["train"], splits["val"]
    sampler = create_sampler(config, train, env)
    fingerprint = checkpoint.fingerprint(config, train, val, env, pipelines.DALI_VERSION)
    replaced: list[Path] = check_folder(config, path, saved, env)
    if path is not None:
        check_resume(path, saved, fingerprint, config, env)
    left_out = saved["left_out"] if saved else {split: sorted(manifest.bad) for split, manifest in splits.items()}
    files, changed = describe_files(config, listed, left_out, path, saved, env)
    state, network = create_state(config, sampler, env, started, train.classes, saved)
    record = RunRecord(
        run=saved["run"] if saved else broadcast(uuid.uuid4().hex, env),
        fingerprint=fingerprint,
        classes=train.classes,
        normalization=network.normalization,
        left_out=left_out,
        files=files,
        versions=library_versions(),
    )
    stream = recording_stream(env.device) if config.cuda_graph else None
    net = distribute(state.model, config, env, stream)
    schedule = create_schedule(config, state.optimizer, sampler.steps_per_epoch)
    val_loader = pipelines.create_val_loader(config, val, env)
    with on_stream(stream):
        loader_state = restore(state, net, saved, config)
    first_batch = state.step * config.grad_accum_steps
    train_loader = pipelines.create_train_loader(config, train, sampler, env, first_batch, loader_state)
    stack.callback(train_loader.close)
    gradients = create_gradients(config, net, state, stream)
    stack.callback(gradients.close)
    log = Log(config.output_dir, env, config.epochs, sampler.steps_per_epoch, config.tensorboard, state.step)
    stack.callback(log.close)
    before = saved_layout(saved) if saved else None
    normalize = Normalize(*network.normalization, dtype=AMP_DTYPES[config.amp], device=env.device)
    warnings = []
    if saved:
        warnings = [*changed, *checkpoint.version_changes(saved["versions"], record.versions)]
        warnings += describe_schedule_change(config, path, saved, sampler)
    return Run(
        config=config,
        env=env,
        state=state,
        gradients=gradients,
        schedule=schedule,
        sampler=sampler,
        train_loader=train_loader,
        val_loader=val_loader,
        num_val=len(val),
        augment=BatchAugment(config, normalize, config.num_classes or 0, env.device),
        amp_dtype=AMP_DTYPES[config.amp],
        record=record,
        origin=f"from {path}" if saved else network.origin,
        changes=checkpoint.changes(saved["config"], config, env.world_size) if saved else [],
        warnings=warnings,
        shared_before=before if before != layout_of(config, env.world_size) else None,
        log=log,
        stop=stop,
        kept=history(path, saved, config, state),
        replaced=replaced,
    )


def library_versions() -> dict[str, str]:
    """Of what decides pixels and weights."""
    return {
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "timm": timm.__version__,
        "DALI": pipelines.DALI_VERSION,
        "Pillow": PIL.__version__,
    }


def check_folder(config: TrainConfig, path: Path | None, saved: dict[str, Any], env: DistEnv) -> list[Path]:
    """The files of the output folder that this launch is to remove with its first step. A collective.

    Raises:
        UserError: on all ranks: there are checkpoints that the run does not continue, and `--overwrite` was not given.
    """
    replaced: list[Path] = []
    with together(env):
        # With --resume PATH too, a restart goes on from its own last checkpoint.
        goes_on = bool(saved) and path != Path(config.resume)
        if env.is_main and not goes_on:
            found = checkpoint.not_continued(config.output_dir, saved)
            if found and not config.overwrite:
                newest, reason = next(iter(found.items()))
                raise UserError(
                    f"--resume {config.resume}: --output-dir {config.output_dir} holds {newest.name}, {reason}; give "
                    "another --output-dir, --resume auto to go on with it, or --overwrite to remove it"
                )
            replaced = list(found)
            if replaced and not saved:
                events = sorted((config.output_dir / "tensorboard").glob("events.*"))
                replaced += [config.output_dir / EVALUATION, *events]
    return replaced


def describe_files(
    config: TrainConfig,
    listed: Splits,
    left_out: dict[str, list[str]],
    path: Path | None,
    saved: dict[str, Any],
    env: DistEnv,
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """`RunRecord.files`, and lines on the files that have changed since the checkpoint `saved`. A collective.

    Names and sizes are the fingerprint's. Of a file with another time of change nobody knows the content, unless
    it was known when the checkpoint was written: then it is read again.

    Raises:
        UserError: on all ranks: a file is known to have another content.
    """
    files: dict[str, dict[str, Tensor]] = {}
    lines: list[str] = []
    known = load_digests(config.output_dir) if env.is_main else {}
    with together(env):
        for split, manifest in listed.items() if env.is_main else ():
            begun = as_begun(manifest, left_out[split])
            digests = content_digests(begun, known, split)
            if saved and saved["fingerprint"][f"files of {split}/"] == begun.fingerprint:
                before = {name: values.numpy() for name, values in saved["files"][split].items()}
                changed = np.flatnonzero(before["mtimes"] != begun.mtimes)
                unsure = compare_contents(begun, changed, before["digests"], digests, path)
                digests = np.where((digests == 0) & (before["mtimes"] == begun.mtimes), before["digests"], digests)
                if len(unsure):
                    lines.append(
                        f"{len(unsure):,} {split} file{'s' if len(unsure) > 1 else ''} changed since the checkpoint, "
                        f"by time, not by size ({begun.files[unsure[0]]}{', ...' if len(unsure) > 1 else ''})"
                    )
            files[split] = {"mtimes": torch.from_numpy(begun.mtimes), "digests": torch.from_numpy(digests)}
    return files, lines


def settings_of_checkpoint(
    config: TrainConfig, saved: dict[str, Any], path: Path | str, env: DistEnv
) -> tuple[TrainConfig, list[str]]:
    """`--evaluate`: what was not given is as in the run that wrote a checkpoint.

    Args:
        config: as the user gave it.
        saved: the configuration of the checkpoint's run.
        path: of the checkpoint, for messages.
        env: this process.

    Returns:
        The configuration to evaluate with, and notes on what differs from the run's.

    Raises:
        UserError: another architecture was given.
    """
    if "arch" in config.given and models.base_arch(config.arch) != models.base_arch(saved["arch"]):
        raise UserError(f"--arch {config.arch}: {path} holds {saved['arch']}, another architecture; leave --arch out")
    values = {name: saved[name] for name in EVALUATION_FLAGS if name not in config.given}
    if values.get("data_dir") is not None:
        values["data_dir"] = Path(values["data_dir"])
    if values.get("loader") == "synthetic" and "data_dir" in config.given:
        del values["loader"]
    if values.get("amp") == "fp16" and env.device.type == "cpu":
        values["amp"] = "none"
    if "image_size" in config.given and "val_resize" in values:
        values["val_resize"] = round(config.image_size * saved["val_resize"] / saved["image_size"])
    config = dataclasses.replace(config, **values)
    validate(config)
    require_data(config)
    now = config.to_dict()
    notes = [
        f"{flag(name)} {now[name]}, its run had {saved[name]}"
        for name in EVALUATION_FLAGS
        if name not in ("data_dir", "batch_size", "hw_decoder_load") and now[name] != saved[name]
    ]
    return config, notes


def keep_start(config: TrainConfig, path: Path | None, saved: dict[str, Any]) -> TrainConfig:
    """What a run began with stays with it: the pretrained weights.

    Raises:
        UserError: others were given.
    """
    if not saved:
        return config
    names = ("pretrained", "pretrained_ema", "pretrained_head")
    begun = {name: saved["config"][name] for name in names}
    for name in names:
        now = getattr(config, name)
        same = _same_source(now, begun[name]) if name == "pretrained" else now == begun[name]
        if name in config.given and not same:
            raise UserError(
                f"{flag(name)} {now}: not used, as {path} is of a run that began with {begun[name]}; give another "
                "--output-dir to start a new run, or leave it out",
                common=True,
            )
    return dataclasses.replace(config, **begun)


def _same_source(one: str | None, other: str | None) -> bool:
    if one is None or other is None or "timm" in (one, other):
        return one == other
    return os.path.realpath(one) == os.path.realpath(other)


def describe_schedule_change(
    config: TrainConfig, path: Path | None, saved: dict[str, Any], sampler: Sampler
) -> list[str]:
    """A line where a resume makes the learning rate jump, as other --epochs do; none where it goes on as it was."""
    before, step, per_epoch = saved["config"], saved["step"], sampler.steps_per_epoch
    names = ("epochs", "lr", "warmup_epochs")
    changed = [name for name in names if before[name] != getattr(config, name)]
    if not changed or step >= config.epochs * per_epoch:
        return []
    old = dataclasses.replace(config, **{name: before[name] for name in names})
    last = rate_at(old, max(0, step - 1), per_epoch, sampler.global_batch_size)
    due = rate_at(old, step, per_epoch, sampler.global_batch_size) if step < old.epochs * per_epoch else last
    now = rate_at(config, step, per_epoch, sampler.global_batch_size)
    if abs(now - due) < LR_JUMP * max(now, due):
        return []
    peaks = [scaled_lr(one.lr, sampler.global_batch_size) for one in (old, config)]
    flags = ", ".join(f"{flag(name)} {before[name]:g} -> {getattr(config, name):g}" for name in changed)
    return [
        f"the learning rate goes from {last:.4g} to {now:.4g} in one step, from {last / peaks[0]:.2%} to "
        f"{now / peaks[1]:.2%} of its peak ({flags}); --pretrained {path} with another --output-dir trains on with a "
        "schedule of its own"
    ]


def introduce(run: Run, splits: Splits, feed: FeedChoice) -> None:
    """The start-up block: what will run, on what, and from where."""
    config, env, state = run.config, run.env, run.state
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    lr = scaled_lr(config.lr, run.sampler.global_batch_size)
    where = torch.cuda.get_device_name(env.device) if env.device.type == "cuda" else "CPU"
    loader: str = config.loader
    if config.loader in ("dali", "proxy"):
        how = f"kept decoded ({config.cache})" if config.cache in pipelines.KEPT else f"{config.decode} decode"
        loader = f"{loader}, DALI {pipelines.DALI_VERSION}, {how}, {config.prefetch} batches ahead"
    ways = {"compiled": config.compile, "fused layers": config.fused_layers, "as a CUDA graph": config.cuda_graph}
    compiled = "".join(f", {way}" for way, used in ways.items() if used)
    moments = {"ddp": "beside the backward pass (ddp)", "flat": "after the backward pass (flat)"}
    exchange = f"; gradients are exchanged {moments[config.grad_exchange]}" if env.world_size > 1 else ""
    start = run.origin
    is_done = state.epoch >= config.epochs
    if state.step:
        position = f"after all {state.epoch} epochs" if is_done else f"at epoch {state.epoch + 1}"
        start = f"resumed {position}, step {state.step}, {run.origin}"
        if config.loader == "proxy" and state.step % run.sampler.steps_per_epoch:
            start += "; images continue in order, but the proxy loader resumes its random draws at epochs only"
        if run.shared_before is not None:
            start += f"; saved by {run.shared_before}: every image still comes once, random draws begin anew"
    facts = {
        "model": f"{config.arch}, {parameters / 1e6:.2f} M parameters, {config.num_classes} classes{compiled}",
        "images": f"{len(splits['train']):,} train, {len(splits['val']):,} val, {config.image_size} px",
        "batch": f"{run.sampler.global_batch_size} = {config.batch_size} images x {env.world_size} processes"
        f" x {config.grad_accum_steps}; {run.sampler.steps_per_epoch} steps per epoch",
        "lr": f"{lr:g} = {config.lr:g} x {run.sampler.global_batch_size} / 256, {config.optimizer}",
        "device": f"{where}, {config.amp if config.amp != 'none' else 'float32'}{exchange}",
        "loader": f"{loader}, {config.workers} CPU threads per process",
        "output": f"{config.output_dir}",
        "start": start,
    }
    if state.ema is not None:
        facts["ema"] = describe_ema(state.ema, config.epochs * run.sampler.steps_per_epoch)
    if feed.reasons and config.loader != "synthetic":
        chosen = (f"{flag(name)} {getattr(config, name)}: {reason}" for name, reason in feed.reasons.items())
        facts["chosen"] = "; ".join(chosen)
    if skipped := describe_skipped(config, splits):
        facts["skipped"] = skipped
    ignored = {split: dataset.describe_ignored(manifest) for split, manifest in splits.items()}
    if told := "; ".join(f"in {split}/ {what}" for split, what in ignored.items() if what):
        facts["ignored"] = told
    if run.changes:
        facts["changed"] = ", ".join(run.changes)
    for name, fact in facts.items():
        run.log.say(f"{name:>8}  {fact}")
    for line in run.warnings:
        run.log.say(f"warning: {line}")
    if is_done:
        run.log.say(
            f"All {config.epochs} epochs are done. To train on, start a new run from its weights: --pretrained "
            f"{config.output_dir / checkpoint.BEST} --output-dir NEW"
        )
