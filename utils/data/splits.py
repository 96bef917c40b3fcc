"""The train and val images of a run: listed, without the bad files, the same on all ranks."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from utils.config import ResolvedConfig, TrainConfig
from utils.data import manifest as dataset
from utils.data.decoding import decoder_of
from utils.data.formats import folder
from utils.data.formats.base import Record
from utils.data.manifest import FileEntry, Listing, Manifest
from utils.data.verification import BAD_FILES, bad_files, verify_dataset
from utils.distributed.collectives import all_gather_object, broadcast
from utils.distributed.group import DistEnv
from utils.errors import UserError

SPLITS = ("train", "val")
SYNTHETIC_TRAIN, SYNTHETIC_VAL, SYNTHETIC_CLASSES = 128_000, 5_000, 1_000  # of --loader synthetic without --data-dir
Splits = dict[str, Manifest]  # by the name of the split


def read_data(config: TrainConfig) -> Splits:
    """List the images of the run: both splits, with `--evaluate` val/ alone; without --data-dir synthetic ones."""
    names = ("val",) if config.evaluate else SPLITS
    if config.data_dir is None:
        sizes = {"train": SYNTHETIC_TRAIN, "val": SYNTHETIC_VAL}
        return {name: dataset.synthetic(sizes[name], config.num_classes or SYNTHETIC_CLASSES) for name in names}
    skip_bad = config.bad_files == "skip"
    if config.evaluate:
        return {"val": folder.scan(config.data_dir, "val", skip_bad)}
    return dict(zip(names, folder.scan_splits(config.data_dir, skip_bad), strict=True))


@dataclasses.dataclass(frozen=True)
class InitialFiles:
    """The files with which a run began.

    Attributes:
        excluded: of each split, the files that the run has been without from its start.
        fingerprints: of each split without them.
    """

    excluded: Mapping[str, Sequence[str]]
    fingerprints: Mapping[str, str]


def exclude_bad_files(config: ResolvedConfig, splits: Splits, env: DistEnv, initial: InitialFiles | None) -> Splits:
    """`--bad-files skip`: the manifests without the files that the loader cannot read. Collective: call on every rank.

    Every file is decoded once, each by one rank. The output folder keeps the results, so that the next launch decodes
    only what has changed. Where a run continues, files may have turned bad or good since its start: see
    `apply_exclusions`.

    Args:
        config: resolved.
        splits: the listed images.
        env: this process.
        initial: the files with which the run began; None for a new run.

    Raises:
        UserError: on all ranks: a class would be left without images, or the output folder cannot be written.
    """
    if config.bad_files != "skip" or config.loader == "synthetic" or config.data_dir is None:
        return splits
    listing = Listing(config.data_dir.absolute(), *_listed(splits))
    decoder = decoder_of(config.loader)
    known = verify_dataset(listing, decoder, config.output_dir, config.workers, env, partial=config.evaluate)
    bad = broadcast({} if known is None else bad_files(known), env)
    good = {}
    for split, manifest in splits.items():
        of_split = {name[len(split) + 1 :]: reason for name, reason in bad.items() if name.startswith(f"{split}/")}
        good[split] = manifest.without(of_split)
        if initial and not config.evaluate:
            good[split] = apply_exclusions(manifest, good[split], of_split, initial, split)
    return good


def _listed(splits: Splits) -> tuple[list[FileEntry], Callable[[int], Record]]:
    """`Listing.entries` and `Listing.record` of all splits, the files that are bad by their listing at the end."""
    entries = [
        FileEntry(f"{split}/{name}", int(size), int(mtime))
        for split, manifest in splits.items()
        for name, size, mtime in zip(manifest.names(), manifest.sizes, manifest.mtimes, strict=True)
    ]
    entries += [FileEntry(f"{split}/{name}", 0, 0, bad) for split in splits for name, bad in splits[split].bad.items()]

    def record(index: int) -> Record:
        for manifest in splits.values():
            if index < len(manifest):
                return manifest.record(index)
            index -= len(manifest)
        raise IndexError("a file that is bad by its listing is not read")

    return entries, record


def apply_exclusions(
    listed: Manifest, good: Manifest, bad: Mapping[str, str], initial: InitialFiles, split: str
) -> Manifest:
    """The images with which a run continues: without `bad`, in the order of the run's start.

    Files of train/ that have turned bad since are replaced by others of their class. Those of val/ are excluded. Files
    that were excluded at the start stay excluded, even if they are good now.

    Args:
        listed: all files.
        good: those that are good now, which is the result for a run that began with them.
        bad: relative to the split's folder, and why.
        initial: the files with which the run began. If they are of another data set, the result is `good`.
        split: train or val.
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


def describe_exclusions(splits: Splits, output_dir: Path) -> str:
    """How many files are excluded, in all and of each class, and where they are listed; "" for none."""
    parts = []
    for split, manifest in splits.items():
        if manifest.bad:
            classes = collections.Counter(name.split("/")[0] for name in manifest.bad)
            counts = ", ".join(f"{name} {count:,}" for name, count in sorted(classes.items()))
            files = len(manifest) - len(manifest.replacements) + len(manifest.bad)
            parts.append(f"{len(manifest.bad):,} of {files:,} {split} files ({counts})")
        if manifest.replacements:
            bad, instead = next(iter(manifest.replacements.items()))
            parts.append(
                f"{len(manifest.replacements):,} of them turned bad after the run had begun: to keep its order, "
                f"images of the same class come twice ({instead} for {bad}, ...)"
            )
    return f"{'; '.join(parts)}: {output_dir / BAD_FILES}" if parts else ""


def check_files(splits: Splits, data_dir: Path | None, env: DistEnv) -> None:
    """Raise UserError on all ranks unless all list the same files. Collective: call on every rank."""
    if len(set(all_gather_object(tuple(manifest.fingerprint for manifest in splits.values()), env))) > 1:
        raise UserError(f"--data-dir {data_dir}: not the same files on all ranks; give all the same", on_all_ranks=True)
