"""Which images a run has: of which folder, held out of train/, without bad files, and on a resume."""

import dataclasses
from pathlib import Path

from tests.conftest import resolved, write_data
from utils.data.images.listing import LISTING, save_listing
from utils.data.reading.verification import DIGESTS
from utils.data.splits.selection import InitialFiles, Splits, describe_exclusions, read_data, select_images
from utils.distributed.group import DistEnv
from utils.options.resolved import ResolvedConfig


def spoil(path: Path) -> bytes:
    """Make an image undecodable; returns what it was. Its size stays."""
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    return content


def names(splits: Splits) -> dict[str, list[str]]:
    return {split: manifest.names() for split, manifest in splits.items()}


def initial_of(splits: Splits, config: ResolvedConfig) -> InitialFiles:
    """What a checkpoint says of the files of its run."""
    excluded = {split: sorted(manifest.bad) for split, manifest in splits.items()}
    prints = {split: manifest.fingerprint for split, manifest in splits.items()}
    return InitialFiles(excluded, prints, config.held_out_by, config.output_dir)


def test_held_out_images_of_a_run_with_bad_files(tmp_path: Path, cpu: DistEnv) -> None:
    """What is bad at the start is in no split; what turns bad later leaves its own, whose other images stay."""
    root, out = tmp_path / "data", tmp_path / "out"
    write_data(root)
    (root / "val").rename(root / "test")
    out.mkdir()
    bad, *_ = sorted(path.relative_to(root / "train") for path in (root / "train" / "blue").iterdir())
    repaired = spoil(root / "train" / bad)
    config = resolved(data_dir=root, output_dir=out, loader="torch", bad_files="skip", val_fraction=0.3)
    listed, begun = select_images(config, read_data(config, cpu), cpu, None)
    assert names(listed) == names(begun)
    assert len(begun["train"]) + len(begun["val"]) == 40
    assert [list(manifest.bad) for manifest in begun.values()] == [[str(bad)], []]
    assert not (out / DIGESTS).exists(), "the verification knows the digests"
    save_listing(out, begun)

    (root / "train" / bad).write_bytes(repaired)
    turned = {split: manifest.name(0) for split, manifest in begun.items()}
    for name in turned.values():
        spoil(root / "train" / name)  # which gives it another digest
    _, later = select_images(config, read_data(config, cpu), cpu, initial_of(begun, config))
    assert [manifest.fingerprint for manifest in later.values()] == [each.fingerprint for each in begun.values()]
    assert later["train"].replacements == {turned["train"]: begun["train"].name(1)}
    assert later["val"].names() == begun["val"].names()[1:]
    described = describe_exclusions(later, out)
    assert described.startswith(f"2 of {len(begun['train']) + 1} train files (blue 2)")
    assert f"1 of {len(begun['val'])} held-out files (blue 1)" in described

    evaluated = dataclasses.replace(config, evaluate=True)
    _, images = select_images(evaluated, read_data(evaluated, cpu), cpu, initial_of(begun, config))
    assert names(images) == {"val": begun["val"].names()[1:]}


def test_held_out_images_without_the_listing(tmp_path: Path, cpu: DistEnv) -> None:
    """They follow from the contents; the listing of another run does not count."""
    root, out = tmp_path / "data", tmp_path / "out"
    write_data(root)
    (root / "val").rename(root / "test")
    out.mkdir()
    config = resolved(data_dir=root, output_dir=out, val_fraction=0.3)
    _, begun = select_images(config, read_data(config, cpu), cpu, None)
    initial = initial_of(begun, config)
    save_listing(out, {"train": begun["val"], "val": begun["train"]})
    assert initial.val_names() == []
    assert names(select_images(config, read_data(config, cpu), cpu, initial)[1]) == names(begun)
    (out / LISTING).unlink()
    assert names(select_images(config, read_data(config, cpu), cpu, initial)[1]) == names(begun)
    other = dataclasses.replace(config, val_fraction=0.5)
    save_listing(out, begun)
    assert initial.val_names() == begun["val"].names()
    found = names(select_images(other, read_data(other, cpu), cpu, initial)[1])
    assert set(found["val"]) > set(begun["val"].names()), "another fraction is not the listing's"


def test_the_folder_that_a_flag_names(tmp_path: Path, cpu: DistEnv) -> None:
    root = write_data(tmp_path / "data")
    (root / "val").rename(root / "valid")
    (root / "valid" / "notes.txt").touch()
    config = resolved(data_dir=root, output_dir=tmp_path, val_split="valid", loader="torch", bad_files="skip")
    spoil(root / "valid" / "red" / "red-000.jpg")
    _, splits = select_images(config, read_data(config, cpu), cpu, None)
    assert (splits["val"].root, splits["val"].title, len(splits["val"])) == (root / "valid", "valid/", 40)
    assert describe_exclusions(splits, tmp_path).startswith("1 of 41 valid files (red 1): ")
    assert '"path": "valid/red/red-000.jpg"' in (tmp_path / "bad_files.json").read_text()
