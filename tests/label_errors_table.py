"""How well wrong labels are found: Imagenette's training images with labels that are wrong on purpose.

    python -m tests.label_errors_table --images IMAGENETTE --output-dir OUT
    python -m tests.label_errors_table --images IMAGENETTE --output-dir OUT --noise 0.5 --flags "--arch resnet18"

The given share of all labels is replaced by another class at random, as in fastai's noisy Imagenette
(https://github.com/fastai/imagenette/tree/master/noisy_labels). Prints a column for each share. Runs of an earlier call
that have ended are not made again.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

from tests.harness import ROOT, TRAIN

Rows = list[dict[str, str]]


def write_labels(source: Path, noise: float, path: Path) -> dict[str, str]:
    """A label file of all training images; the true class by file."""
    files = sorted(str(each.relative_to(source)) for each in (source / "train").glob("*/*"))
    true = {file: Path(file).parent.name for file in files}
    classes, random = sorted(set(true.values())), np.random.default_rng(42)
    given = dict(true)
    for index in random.permutation(len(files))[: round(noise * len(files))]:
        others = [each for each in classes if each != true[files[index]]]
        given[files[index]] = others[random.integers(len(others))]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label"), *((source / name, label) for name, label in given.items())])
    return {str(source / name): label for name, label in true.items()}


def figures(rows: Rows, true: dict[str, str]) -> list[str]:
    """The cells of a column: `rows` of label_errors.csv, the most doubtful label first."""
    wrong = np.array([row["label"] != true[row["file"]] for row in rows])
    doubted = np.array([row["is_issue"] == "true" for row in rows])
    proposed = np.array([row["proposed"] == true[row["file"]] for row in rows])
    score = np.array([float(row["score"]) for row in rows])
    number = int(wrong.sum())
    shares = [wrong[:100], wrong[:number], wrong[doubted], doubted[wrong], proposed[wrong & doubted], proposed]
    first, as_many, precision, recall, right, accuracy = (f"{100 * each.mean():.1f} %" for each in shares)
    return [
        f"{number:,} of {len(rows):,}",
        first,
        as_many,
        f"{roc_auc_score(wrong, -score):.3f}",
        f"{int(doubted.sum()):,}; {precision}",
        recall,
        right,
        accuracy,
    ]


NAMES = (
    "wrong labels",
    "the first 100 that are wrong",
    "as many first as are wrong, that are wrong",
    "area under the ROC curve of the score",
    "count as wrong; of these are wrong",
    "wrong ones that count as wrong",
    "of these, with the right proposed label",
    "accuracy out of fold, by the true labels",
)


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.25, 0.5])
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--flags", default="", help="of train.py")
    given = parser.parse_args(argv)
    source, columns = given.images.resolve(), []
    for noise in given.noise:
        folder = given.output_dir / f"noise-{noise:g}"
        folder.mkdir(parents=True, exist_ok=True)
        true = write_labels(source, noise, labels := folder.resolve() / "labels.csv")
        runs = [folder / f"fold-{number}" for number in range(1, given.folds + 1)]
        for number, run in enumerate(runs, 1):
            words = [f"--fold={number}/{given.folds}", f"--train-data={labels}", *given.flags.split()]
            command = [sys.executable, TRAIN, "--data-dir", source, "--output-dir", run, *words]
            if not (run / "summary.json").exists():
                subprocess.run(command, check=True, stdout=sys.stderr)
            print(noise, number, json.loads((run / "summary.json").read_text())["best_top1"], file=sys.stderr)
        command = [sys.executable, ROOT / "scripts/find_label_errors.py", *runs, "--output-dir", folder / "found"]
        if not (folder / "found/label_errors.csv").exists():
            subprocess.run(command, check=True, stdout=sys.stderr)
        with (folder / "found/label_errors.csv").open(newline="") as file:
            columns.append(figures(list(csv.DictReader(file)), true))
    print(f"| | {' | '.join(f'{100 * noise:g} %' for noise in given.noise)} |\n|{'---|' * (len(columns) + 1)}")
    for name, *cells in zip(NAMES, *columns, strict=True):
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
