"""The train and val manifests of a run: read, bad files excluded, the same on all ranks."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from utils.config import ResolvedConfig, TrainConfig
from utils.data import manifest as dataset
from utils.data.decoding import decoder_of
from utils.data.formats import folder
from utils.data.manifest import FileEntry, Manifest
from utils.data.verification import BAD_FILES, bad_files, verify_dataset
from utils.distributed.collectives import all_gather_object, broadcast
from utils.distributed.group import DistEnv
from utils.errors import UserError

SPLITS = ("train", "val")
SYNTHETIC_TRAIN, SYNTHETIC_VAL, SYNTHETIC_CLASSES = 128_000, 5_000, 1_000  # of --loader synthetic without --data-dir
Splits = dict[str, Manifest]  # by the name of the split


def read_data(config: TrainConfig) -> Splits:
    """List what the run reads: both splits, `--evaluate` val/ alone; synthetic data without --data-dir has any size."""
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


def leave_out_bad(config: ResolvedConfig, splits: Splits, env: DistEnv, initial: InitialFiles | None) -> Splits:
    """`--bad-files skip`: the manifests without the files that the loader cannot read. A collective.

    Every file is decoded once, by all ranks together; what was found is kept in the output folder, for the next launch
    to decode no more than what has changed. A run that began with files which are bad now, or without files which are
    good now, goes on as `apply_exclusions` says; `initial` are those with which it began.

    Raises:
        UserError: on all ranks: a class would be left without images, or the output folder cannot be written.
    """
    if config.bad_files != "skip" or config.loader == "synthetic" or config.data_dir is None:
        return splits
    entries = [
        FileEntry(f"{split}/{name}", int(size), int(mtime))
        for split, manifest in splits.items()
        for name, size, mtime in zip(manifest.files, manifest.sizes, manifest.mtimes, strict=True)
    ]
    entries += [FileEntry(f"{split}/{name}", 0, 0, bad) for split in splits for name, bad in splits[split].bad.items()]
    decoder = decoder_of(config.loader)
    known = verify_dataset(
        config.data_dir.absolute(), entries, decoder, config.output_dir, config.workers, env, config.evaluate
    )
    bad = broadcast({} if known is None else bad_files(known), env)
    kept = {}
    for split, manifest in splits.items():
        of_split = {name[len(split) + 1 :]: reason for name, reason in bad.items() if name.startswith(f"{split}/")}
        kept[split] = manifest.without(of_split)
        if initial and not config.evaluate:
            kept[split] = apply_exclusions(manifest, kept[split], of_split, initial, split)
    return kept


def apply_exclusions(
    listed: Manifest, kept: Manifest, bad: Mapping[str, str], initial: InitialFiles, split: str
) -> Manifest:
    """The images with which a run goes on: without `bad`, but in the order that it has begun with.

    Where files of train/ have turned bad since, others stand in for them. Those of val/ are left out. What the run has
    been without from its start stays left out, even if it is good now.

    Args:
        listed: all files.
        kept: those that are good now, which is the result if the run began with them.
        bad: relative to the split's folder, and why.
        initial: the files with which it began; if they are another data set's, so is the result.
        split: train or val.
    """
    begun = as_begun(listed, initial.excluded[split], bad)
    if begun.fingerprint != initial.fingerprints[split]:
        return kept
    if split == "train":
        return begun.with_replacements(bad)
    return dataclasses.replace(begun.without(bad), fingerprint=begun.fingerprint)


def as_begun(listed: Manifest, excluded_files: Sequence[str], bad: Mapping[str, str] | None = None) -> Manifest:
    """The images with which a run began that has been without the files `excluded_files`; `bad` has their reasons."""
    reasons = bad or {}
    return (
        listed.without({name: reasons.get(name, "bad when the run began") for name in excluded_files})
        if excluded_files
        else listed
    )


def describe_skipped(config: ResolvedConfig, splits: Splits) -> str:
    """How many files were left out, in all and of each class; "" for none."""
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
    return f"{'; '.join(parts)}: {config.output_dir / BAD_FILES}" if parts else ""


def check_files(config: ResolvedConfig, splits: Splits, env: DistEnv) -> None:
    """Raise UserError on all ranks unless all of them list the same files. A collective."""
    if len(set(all_gather_object(tuple(manifest.fingerprint for manifest in splits.values()), env))) > 1:
        raise UserError(
            f"--data-dir {config.data_dir}: not the same files on all ranks; give all the same", on_all_ranks=True
        )
