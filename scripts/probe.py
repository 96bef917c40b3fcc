#!/usr/bin/env python3
"""Judge embeddings without training: nearest neighbors, logistic regression, and images that are nearly the same.

    scripts/predict.py runs/imagenet-resnet50 /data/imagenet/train --output-type embedding --output-dir embeddings/train
    scripts/predict.py runs/imagenet-resnet50 /data/imagenet/val --output-type embedding --output-dir embeddings/val
    scripts/probe.py embeddings/train embeddings/val --output-dir probe --report

Prints the accuracy on VAL of classifiers that know TRAIN, and how many pairs of images are nearly the same: one in
TRAIN and one in VAL, or in one of them with different classes. With --output-dir, writes probe.json and
near_duplicates.csv; with --report also near_duplicates.html, a page with small pictures.

Exit status: 0 done, 2 wrong usage, or embeddings that do not fit each other.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.errors import UserError
from utils.log import emit
from utils.options.cli import Program, train_flag, with_train_flags
from utils.options.limits import Limit
from utils.options.readers import number_option
from utils.progress import end_status, show_status, start_status
from utils.text import count

RANGE = Limit(above=0, maximum=1)


@dataclasses.dataclass(frozen=True)
class ProbeOptions:
    """The command line.

    Attributes:
        train, val: files of embeddings, or their folders.
        threshold: cosine similarity from which two images are nearly the same.
        output_dir: of the files; None prints only.
    """

    train: Path
    val: Path
    threshold: float
    report: bool
    output_dir: Path | None


@with_train_flags(
    train_flag("output_dir", help="Where probe.json and the other files go.", shown="none, the figures are printed")
)
def read_options(
    train: Annotated[Path, typer.Argument(metavar="TRAIN", help="Embeddings that the classifiers know.")],
    val: Annotated[Path, typer.Argument(metavar="VAL", help="Embeddings that they are judged on.")],
    threshold: Annotated[
        float, typer.Option(help="Cosine similarity from which two images are near-duplicates.", **number_option(float))
    ] = 0.98,
    report: Annotated[bool, typer.Option("--report", help="Also write a page with pictures of the pairs.")] = False,
    *,
    output_dir: Path | None,
) -> ProbeOptions:
    """Judge embeddings by nearest neighbors and logistic regression, and find images that are nearly the same.

    Exit status: 0 done, 2 wrong usage, or embeddings that do not fit each other.
    """
    RANGE.check("--threshold", threshold)
    if report and output_dir is None:
        raise UserError("--report without --output-dir: the page is a file; give --output-dir DIR")
    return ProbeOptions(train, val, threshold, report, output_dir)


def run(options: ProbeOptions) -> None:
    """Print the figures and write the files.

    Raises:
        UserError: the embeddings cannot be used together, or the folder not be written.
    """
    os.environ.setdefault("SCIPY_ARRAY_API", "1")  # before scipy is imported: scikit-learn then computes on the GPU
    # What takes seconds comes after the checks of the command line.
    start_status("reading the embeddings")
    from utils.inference.embedding_files import check_fit, find_embeddings, read_embeddings

    for path, name in ((options.train, "TRAIN"), (options.val, "VAL")):
        find_embeddings(path, name)
    train, val = read_embeddings(options.train, "TRAIN"), read_embeddings(options.val, "VAL")
    check_fit(train, val)

    from utils.distributed.device import choose_device
    from utils.distributed.launcher import read_launch
    from utils.inference.probe import near_duplicates, neighbor_accuracies, regression_accuracies
    from utils.inference.probe_files import Probe, prepare, write_probe

    if options.output_dir is not None:
        prepare(options.output_dir, options.report)
    end_status()
    network = f"{count(train.features.shape[1], 'feature')} of {train.network['arch']}"
    emit(f"{train.path}: {count(len(train), 'image')}; {val.path}: {len(val):,}; {network}")
    start_status("nearest neighbors")
    device = choose_device("auto", read_launch())
    neighbors = neighbor_accuracies(train, val, device)
    show_status("logistic regression")
    regression = regression_accuracies(train, val, device)
    show_status("near-duplicates")
    pairs, counts = near_duplicates(train, val, device, options.threshold)
    end_status()
    if val.top1 is not None:
        emit(f"the network itself   top1 {val.top1:.2f}")
    emit("nearest neighbors    " + "  ".join(f"k {k}: {top1:.2f}" for k, top1 in neighbors.items()))
    emit("logistic regression  " + "  ".join(f"C {c:g}: {fit.top1:.2f}" for c, fit in regression.items()))
    if open_ends := [f"C {c:g}" for c, fit in regression.items() if not fit.converged]:
        emit(f"note: logistic regression with {', '.join(open_ends)} stopped before its best weights")
    found = Probe(neighbors, regression, options.threshold, pairs, counts)
    emit(found.summary)
    if options.output_dir is not None:
        written = write_probe(options.output_dir, train, val, found, options.report)
        emit(f"{options.output_dir}: {', '.join(written)}")


PROGRAM = Program("probe.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    try:
        return PROGRAM.run(argv, run)
    finally:
        end_status()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
