"""The train and val images of a run: listed, without the bad files, the same on all ranks."""

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from utils.data.dali import dali_device
from utils.data.formats import folder
from utils.data.formats.index import read_shards
from utils.data.formats.label_files import create_manifests as create_labeled
from utils.data.formats.label_rows import has_several, lists_validation, read_labels
from utils.data.formats.shards import Shards, create_manifests, first_label
from utils.data.formats.sources import (
    Source,
    class_names_of,
    find_source,
    read_given_names,
    required_splits,
    with_val_fraction,
)
from utils.data.formats.split_folders import BESIDE, find_folder, folder_of, refuse_val_folder, unused_val_folder
from utils.data.images import manifest as dataset
from utils.data.images.listing import load_listing
from utils.data.images.manifest import FileEntry, Listing, Manifest, files_fingerprint
from utils.data.images.records import Record
from utils.data.reading.decoding import decoder_of
from utils.data.reading.verification import BAD_FILES, bad_files, verify_dataset
from utils.data.splits.folds import check_parts, choose_fold_of_groups
from utils.data.splits.groups import choose_groups, find_groups
from utils.data.splits.holdout import check_classes, choose_by_content, choose_by_name, divide
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, broadcast, sync_errors
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.config import TrainConfig
from utils.options.resolved import ResolvedConfig
from utils.targets import Targets
from utils.text import count

SPLITS = ("train", "val")
SYNTHETIC_TRAIN, SYNTHETIC_VAL, SYNTHETIC_CLASSES = 128_000, 5_000, 1_000  # of --loader synthetic without --data-dir
Splits = dict[str, Manifest]  # by the name of the split


@collective
def read_data(config: TrainConfig, env: DistEnv, splits: Sequence[str] = ()) -> Splits:
    """List the images of the run.

    Args:
        config: with `data_dir`, or None for synthetic data.
        splits: train, val or both; () for those that the run needs.

    Returns:
        Both splits, with `--evaluate` val alone; without --data-dir synthetic ones. With `--val-fraction` and
        `--fold` it is train alone, which `select_images` divides.

    Raises:
        UserError: on all ranks: data is missing, damaged, or of no known format.
    """
    splits = splits or required_splits(config)
    if config.data_dir is None:
        sizes = {"train": SYNTHETIC_TRAIN, "val": SYNTHETIC_VAL}
        names = ("val",) if config.evaluate else SPLITS
        listed = {name: dataset.synthetic(sizes[name], config.num_classes or SYNTHETIC_CLASSES) for name in names}
        return _for_task(listed, config)
    listed = {}
    with sync_errors(env):
        source = find_source(config, splits)
        if source.has_class_folders:
            listed = _read_folders(dataclasses.replace(config, data_dir=source.data_dir), splits)
        elif source.label_files:
            listed = _read_label_files(config, source, splits)
    if source.format is not None:
        listed = _read_shards(config, source, splits, env)
    listed = _for_task(listed, config)
    with sync_errors(env):
        if not config.evaluate or config.held_out:  # which are all that groups are for
            listed = {split: find_groups(manifest, config.val_group) for split, manifest in listed.items()}
        if config.held_out:  # before all files are read
            check_classes(listed["train"], config.held_out_by)
        if fold := config.held_out_fold:
            check_parts(listed["train"], fold)
    return listed


@collective
def hold_out_by_default(config: TrainConfig, env: DistEnv) -> TrainConfig:
    """The configuration with a `--val-fraction` where the data needs one and none is given, the same on all ranks.

    Raises:
        UserError: on all ranks: as `read_data`.
    """
    with sync_errors(env):
        fraction = with_val_fraction(config).val_fraction if env.is_main else None
    return dataclasses.replace(config, val_fraction=broadcast(fraction, env))


def unused_validation(config: TrainConfig) -> str:
    """The data's own validation images, which `--fold` leaves out, for messages; "" for none."""
    if config.fold is None or config.data_dir is None:
        return ""
    source = find_source(config, ("train",))
    if source.has_class_folders:
        train = folder_of(dataclasses.replace(config, data_dir=source.data_dir), "train")
        return f"{name}/" if (name := unused_val_folder(source.data_dir, train)) else ""
    if "val" in source.shards:
        return f"the shards of val ({source.shards['val'][0].name}, ...)"
    return f"val of {source.label_files['val'].name}" if lists_validation(source.label_files) else ""


def _for_task(listed: Splits, config: TrainConfig) -> Splits:
    """With `--task multilabel` also the one class of a folder or shard is a set."""
    if config.task != "multilabel":
        return listed
    return {split: manifest.with_label_sets() for split, manifest in listed.items()}


def _read_folders(config: TrainConfig, splits: Sequence[str]) -> Splits:
    assert config.data_dir is not None, "synthetic data is not read"
    skip_bad = config.bad_files == "skip"
    if config.class_names is not None:
        raise UserError(f"--class-names {config.class_names}: the class folders name the classes; leave it out")
    if config.held_out:
        if config.val_split != "val":
            raise UserError(
                f"--val-split {config.val_split} with {config.held_out_by}: two sources of validation images; give one "
                "of them"
            )
        splits = ("train",)
    names = {split: folder_of(config, split) for split in splits}
    leaves_out = config.fold is not None and names["train"] != BESIDE  # where val/ would be a class
    if config.held_out and not config.evaluate and not leaves_out:
        refuse_val_folder(config.data_dir, names["train"], config.held_out_by)
    if len(splits) == 1:
        train = names.get("train") or find_folder(config.data_dir, "train", config.train_split) or "train"
        return {splits[0]: folder.scan(config.data_dir, names[splits[0]], skip_bad, train)}
    return dict(zip(SPLITS, folder.scan_splits(config.data_dir, skip_bad, names["val"], names["train"]), strict=True))


def _read_label_files(config: TrainConfig, source: Source, splits: Sequence[str]) -> Splits:
    assert config.data_dir is not None, "synthetic data is not read"
    if config.val_fraction and not config.evaluate and lists_validation(source.label_files):
        raise UserError(
            f"--val-fraction {config.val_fraction:g}: {source.label_files['val']} lists validation images, which would "
            "not be used; leave --val-fraction out"
        )
    names = read_given_names(config.class_names) if config.class_names is not None else None
    several = has_several(source.label_files, config.task)
    labels = {
        split: read_labels(source.label_files[split], split, config.val_split, config.val_group, several)
        for split in splits
    }
    return create_labeled(config.data_dir, labels, names, config.bad_files == "skip", several)


@collective
def _read_shards(config: TrainConfig, source: Source, splits: Sequence[str], env: DistEnv) -> Splits:
    assert source.format is not None, "class folders have no shards"
    with sync_errors(env):  # before all shards are read
        if config.val_fraction and "val" in source.shards and not config.evaluate:
            raise UserError(
                f"{config.held_out_by}: --data-dir {config.data_dir} has shards of val "
                f"({source.shards['val'][0].name}, ...), which would not be used; leave --val-fraction out"
            )
        given = read_given_names(config.class_names) if config.class_names is not None else None
    workers = config.workers or max(1, len(os.sched_getaffinity(0)) // env.local_world_size)

    def read(names: Sequence[str]) -> list[Shards]:
        assert source.format is not None
        return [
            read_shards(name, source.format, source.shards[name], config.output_dir, workers, env) for name in names
        ]

    found = read(splits)
    others = read([split for split in source.shards if split not in splits]) if _may_count_from_1(found) else []
    listed: Splits = {}
    with sync_errors(env):
        names = class_names_of(source, given, config.class_names)
        listed = create_manifests(found, names, source.format.NAME, config.bad_files == "skip", others)
    return listed


def _may_count_from_1(splits: Sequence[Shards]) -> bool:
    """Whether labels are numbers without 0: they count from 1, or class 0 has images in the other split alone."""
    return not splits[0].index.texts and min(map(first_label, splits)) > 0


@dataclasses.dataclass(frozen=True)
class InitialFiles:
    """The files with which a run began.

    Attributes:
        excluded: of each split, the files that the run has been without from its start.
        fingerprints: of each split without them.
        held_out_by: the flag that holds out val, and its value; see `TrainConfig`.
        folder: that may have the run's listing.
    """

    excluded: Mapping[str, Sequence[str]]
    fingerprints: Mapping[str, str]
    held_out_by: str = ""
    folder: Path | None = None

    def val_names(self) -> list[str]:
        """The files of val, from the listing; [] where it is missing, or is another run's."""
        listed = load_listing(self.folder, "val") if self.folder is not None else {}
        names = np.array([os.fsencode(name) for name in listed])
        sizes = np.array(list(listed.values()), dtype=np.int64)
        return list(listed) if files_fingerprint(names, sizes) == self.fingerprints["val"] else []


@collective
def select_images(
    config: ResolvedConfig, listed: Splits, env: DistEnv, initial: InitialFiles | None
) -> tuple[Splits, Splits]:
    """Divide train/ by `--val-fraction` or `--fold`, then exclude files by `--bad-files skip`.

    Where a run continues, files may have turned bad or good since its start: see `apply_exclusions`.

    Args:
        listed: the images, from `read_data`.
        initial: the files with which the run began; None for a new run.

    Returns:
        Train and val (with `--evaluate` only val), first with the files that `--bad-files skip` excludes, then without.
        Those that a divided train/ is without from its start are in neither.

    Raises:
        UserError: on all ranks: a class would be left without images, a file cannot be read, or the output folder
            not be written.
    """
    skips_bad = config.bad_files == "skip" and config.loader != "synthetic" and config.data_dir is not None
    bad = _find_bad_files(config, listed, env) if skips_bad else {}
    if config.held_out and config.data_dir is not None:
        reasons = _bad_of(listed["train"], bad)
        excluded = initial.excluded["train"] if initial and initial.held_out_by else list(reasons)
        train = initial_manifest(listed["train"], excluded, reasons).with_all_classes()
        listed = _hold_out(config, train, env, initial)
        if config.evaluate:
            del listed["train"]
    if not skips_bad:
        return listed, listed
    good = {}
    for split, manifest in listed.items():
        reasons = _bad_of(manifest, bad)
        good[split] = manifest.without(reasons)
        if split == "train":
            good[split].with_all_classes()
        if initial and not config.evaluate:
            good[split] = apply_exclusions(manifest, good[split], reasons, initial, split)
    return listed, good


def _bad_of(manifest: Manifest, bad: Mapping[str, str]) -> dict[str, str]:
    """Those of the files `bad`, relative to the data set, that the manifest lists, relative to its folder; why."""
    return {name: bad[path] for name in manifest.names() if (path := manifest.path(name)) in bad} if bad else {}


@collective
def _hold_out(config: ResolvedConfig, train: Manifest, env: DistEnv, initial: InitialFiles | None) -> Splits:
    """Train and val of a divided train/: as the run began where its listing is there, else by groups or contents."""
    chosen = None
    if env.is_main and initial and initial.held_out_by == config.held_out_by:
        chosen = choose_by_name(train, initial.val_names())
    chosen = broadcast(chosen, env)
    if chosen is None and train.groups is not None:
        with sync_errors(env):  # by one rank, as the other ranks of a host would do the same with its memory and cores
            if env.is_main:
                fold = config.held_out_fold
                chosen = choose_fold_of_groups(train, fold) if fold else choose_groups(train, config.val_fraction)
        chosen = broadcast(chosen, env)
    if chosen is None:
        choice = config.held_out_fold or config.val_fraction
        chosen = choose_by_content(train, choice, config.output_dir, config.workers, env)
    return divide(train, chosen)


@collective
def _find_bad_files(config: ResolvedConfig, splits: Splits, env: DistEnv) -> dict[str, str]:
    """The files that the loader cannot read, relative to the data set, and why.

    Every file is decoded once, each by one rank. The output folder keeps the results, so that the next launch decodes
    only what has changed.
    """
    assert config.data_dir is not None, "synthetic data has no files"
    listing = listing_of(config.data_dir, splits)
    decoder = decoder_of(config.loader, dali_device(env))
    known = verify_dataset(listing, decoder, config.output_dir, config.workers, env, partial=config.evaluate)
    return broadcast({} if known is None else bad_files(known), env)


def listing_of(data_dir: Path, splits: Splits) -> Listing:
    """The images of all splits, those that are bad by their listing at the end."""
    entries = [
        FileEntry(manifest.path(name), int(size), int(mtime))
        for manifest in splits.values()
        for name, size, mtime in zip(manifest.names(), manifest.sizes, manifest.mtimes, strict=True)
    ]
    entries += [
        FileEntry(manifest.path(name), 0, 0, bad) for manifest in splits.values() for name, bad in manifest.bad.items()
    ]

    def record(index: int) -> Record:
        for manifest in splits.values():
            if index < len(manifest):
                return manifest.record(index)
            index -= len(manifest)
        raise IndexError("a file that is bad by its listing is not read")

    return Listing(data_dir.absolute(), entries, record)


def apply_exclusions(
    listed: Manifest, good: Manifest, bad: Mapping[str, str], initial: InitialFiles, split: str
) -> Manifest:
    """The images with which a run continues: without `bad`, in the order of the run's start.

    Files of train that have turned bad since are replaced by others of their class. Those of val are excluded. Files
    that were excluded at the start stay excluded, even if they are good now.

    Args:
        good: those that are good now, which is the result for a run that began with them.
        bad: relative to the split's folder, and why.
        initial: the files with which the run began. If they are of another data set, the result is `good`.
    """
    manifest = initial_manifest(listed, initial.excluded[split], bad)
    if manifest.fingerprint != initial.fingerprints[split]:
        return good
    if split == "train":
        return manifest.with_replacements(bad)
    return dataclasses.replace(manifest.without(bad), fingerprint=manifest.fingerprint)


def initial_manifest(listed: Manifest, excluded_files: Sequence[str], bad: Mapping[str, str] | None = None) -> Manifest:
    """The images with which a run began that excluded `excluded_files`; `bad` has the reasons that are known now."""
    reasons = bad or {}
    if not excluded_files:
        return listed
    return listed.without({name: reasons.get(name, "bad when the run began") for name in excluded_files})


def create_targets(config: ResolvedConfig, manifest: Manifest, env: DistEnv) -> Targets:
    """What the labels of a split stand for."""
    return Targets(config.num_classes, manifest.label_sets, env.device)


def describe_exclusions(splits: Splits, output_dir: Path) -> str:
    """How many files are excluded, in all and of each class, and where they are listed; "" for none."""
    parts = []
    for manifest in splits.values():
        if manifest.bad:
            classes = collections.Counter(name.split("/")[0] for name in manifest.bad)
            counts = ", ".join(f"{name} {count:,}" for name, count in sorted(classes.items()))
            files = len(manifest) - len(manifest.replacements) + len(manifest.bad)
            parts.append(f"{len(manifest.bad):,} of {count(files, f'{manifest.kind} file')} ({counts})")
        if manifest.replacements:
            bad, instead = next(iter(manifest.replacements.items()))
            parts.append(
                f"{len(manifest.replacements):,} of them turned bad after the run had begun: to keep its order, "
                f"others come twice ({instead} for {bad}, ...)"
            )
    return f"{'; '.join(parts)}: {output_dir / BAD_FILES}" if parts else ""


@collective
def check_files(splits: Splits, data_dir: Path | None, env: DistEnv) -> None:
    """Raise UserError on all ranks unless all list the same files."""
    if len(set(all_gather_object(tuple(manifest.fingerprint for manifest in splits.values()), env))) > 1:
        raise UserError(f"--data-dir {data_dir}: not the same files on all ranks; give all the same", on_all_ranks=True)
