#!/usr/bin/env python3
"""Export the network of a checkpoint for other programs: timm, ONNX Runtime, torch.export.

    scripts/export.py runs/imagenet-resnet50 --format onnx --output-dir exported
    scripts/export.py runs/imagenet-resnet50 --format onnx --int8 --output-dir exported-int8

Writes model.safetensors and config.json (timm), model.onnx or model.pt2, and labels.txt: a class a
line, in label order. The layers are timm's own. Before a file gets its name it is read by its own runtime, and compared
with torch on images of the run. A folder may hold all formats of one network.

With --int8 it is calibrated on training images of the run, and compared on all its validation images.

Exit status: 0 done, 1 the network cannot be exported, or the comparison failed; 2 wrong usage or a damaged checkpoint.
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from utils.errors import RunFailed, UserError, first_line, readable
from utils.log import emit
from utils.options.cli import REQUIRED, Program, train_flag, with_train_flags
from utils.options.limits import MIN_0
from utils.options.readers import choice_option, number_option
from utils.text import count

FormatName = Literal["timm", "onnx", "pt2"]
InputName = Literal["float", "uint8"]
PACKAGES: dict[str, tuple[str, ...]] = {"onnx": ("onnx", "onnxruntime", "onnxscript")}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        checkpoint: a file, or the output folder of a run.
        format: see `utils.inference.export.formats`.
        ema: whether the moving average is exported; None for the better network.
        input: what the exported network takes; see `utils.inference.export.classifier.Classifier`.
        half: whether its layers are float16.
        check: whether it is compared with torch.
        check_data: folder of images for that; None for those of the run.
        int8: whether weights and activations are quantized.
        max_loss: points of accuracy that this may cost; None for 1.
        data_dir: the images of the run; None for where it read them.
        push: repository on the Hugging Face hub that gets them, too.
    """

    checkpoint: Path
    format: FormatName
    output_dir: Path
    ema: bool | None
    input: InputName
    half: bool
    check: bool
    check_data: Path | None
    overwrite: bool
    push: str | None
    int8: bool
    max_loss: float | None
    data_dir: Path | None


def export(options: Options) -> None:
    """Write the files.

    Raises:
        UserError: the checkpoint cannot be used, or the folder not be written.
        RunFailed: the network cannot be exported, or what was exported computes something else.
    """
    # What takes seconds comes after the checks of the command line.
    from utils.inference.export.formats import FORMATS, LABELS
    from utils.inference.export.int8 import to_int8
    from utils.inference.export.output import check_output, label_lines, staged, write_and_compare
    from utils.inference.export.run_images import find_run_images
    from utils.inference.export.trained import EMA, load_trained

    files = FORMATS[options.format].files
    trained = load_trained(options.checkpoint, options.ema)
    if options.data_dir is not None:
        trained = dataclasses.replace(trained, config=dataclasses.replace(trained.config, data_dir=options.data_dir))
    labels = label_lines(trained.classes)
    check_output(options.output_dir, files, labels, options.overwrite)
    weights = "EMA weights" if trained.weights == EMA else "weights"
    accuracy = trained.accuracy or "not evaluated"
    with staged(options.output_dir, (LABELS, *files)) as folder:
        images = find_run_images(trained.saved, options.data_dir, folder) if options.int8 else None
        emit(
            f"{trained.path}: {trained.config.arch}, {count(trained.config.num_classes, 'class')}, {weights}, "
            f"{accuracy}"
        )
        (folder / LABELS).write_bytes(labels.encode())
        try:
            compared = write_and_compare(
                trained, options.format, options.input, options.half, folder, options.check, options.check_data
            )
            quantized = to_int8(trained, options.input, folder, images, options.max_loss) if images else ""
        except (UserError, RunFailed, OSError):
            raise
        except Exception as error:  # exporters and runtimes have no common one
            reason = first_line(error, 200)
            raise RunFailed(
                f"--format {options.format}: {trained.config.arch} cannot be exported ({reason}); give another format"
            ) from error
        size = sum((folder / name).stat().st_size for name in files)
    emit(compared)
    if quantized:
        emit(quantized)
    emit(f"{options.output_dir}: {', '.join((*files, LABELS))}; {size / 1e6:,.1f} MB")
    if options.push is not None:
        from utils.inference.export.hub import push

        emit(f"uploaded: {push(options.output_dir, (*files, LABELS), options.push, trained)}")


@with_train_flags(
    train_flag("output_dir", default=REQUIRED, shown=False, help="Where the files go."),
    train_flag("data_dir", help="The images of the run, for --int8.", shown="where the run read them"),
)
def read_options(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A file, or the output folder of a run.")],
    format: Annotated[FormatName, typer.Option(help="Form of the files.", **choice_option(FormatName))],
    ema: Annotated[
        bool | None,
        typer.Option("--ema/--no-ema", help="Take the moving average, or the model.", show_default="the better one"),
    ] = None,
    input: Annotated[
        InputName,
        typer.Option(
            help="Images: normalized NCHW, or pixels NHWC that are normalized inside.", **choice_option(InputName)
        ),
    ] = "float",
    half: Annotated[bool, typer.Option("--half", help="Compute in float16; input and logits stay.")] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Compute in int8, calibrated on training images; input and logits stay.")
    ] = False,
    max_loss: Annotated[
        float | None,
        typer.Option(help="Points of top-1, or mAP, that --int8 may lose.", show_default="1", **number_option(float)),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Read the files back and compare them with torch.")
    ] = True,
    check_data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images for that.", show_default="of the run, else generated")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="Upload to this repository of the Hugging Face hub; a new one is private."
        ),
    ] = None,
    *,
    output_dir: Path,
    data_dir: Path | None,
) -> Options:
    """Export the network of a checkpoint for timm, ONNX Runtime or torch.export.

    Exit status: 0 done, 1 the network cannot be exported, or the comparison failed; 2 wrong usage or a damaged
    checkpoint.
    """
    options = Options(
        checkpoint, format, output_dir, ema, input, half, check, check_data, overwrite, push, int8, max_loss, data_dir
    )
    _check(options)
    _check_int8(options)
    return options


def _check_int8(options: Options) -> None:
    """Refuse what does not go with `--int8`, or goes with it only."""
    MIN_0.check("--max-loss", options.max_loss)
    of_int8 = {"--max-loss": options.max_loss, "--data-dir": options.data_dir}
    for name in (name for name, value in of_int8.items() if value is not None and not options.int8):
        raise UserError(f"{name} without --int8: is for what int8 costs; leave it out, or give --int8")
    if options.int8 and options.format != "onnx":
        raise UserError(
            f"--int8 with --format {options.format}: ONNX Runtime quantizes; give --format onnx, or leave --int8 out"
        )
    if options.int8 and options.half:
        raise UserError("--int8 with --half: a network computes in one of them; leave one out")


def _check(options: Options) -> None:
    """Refuse what does not go together."""
    if (shown := readable(str(options.output_dir))) != str(options.output_dir):
        raise UserError(
            f"--output-dir {shown}: the packages that write there need a name in UTF-8; give another folder"
        )
    if options.format == "timm" and options.half:
        raise UserError("--half with --format timm: its files hold float32; leave it out, and call model.half()")
    if options.format == "timm" and options.input == "uint8":
        raise UserError("--input uint8 with --format timm: timm's networks take normalized images; leave it out")
    if options.push is not None and options.format != "timm":
        raise UserError(
            f"--push {options.push} with --format {options.format}: the hub gets timm's files; give --format timm"
        )
    if options.check_data is not None and not options.check:
        raise UserError(
            f"--check-data {options.check_data} with --no-check: nothing is compared; leave one of them out"
        )
    if options.check_data is not None and not options.check_data.is_dir():
        raise UserError(f"--check-data {options.check_data}: no such folder; give a folder of images")
    missing = [name for name in PACKAGES.get(options.format, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--format {options.format}: needs {', '.join(missing)}, not installed here; "
            "pip install -r requirements-export.txt -c constraints.txt"
        )


PROGRAM = Program("export.py", read_options)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    return PROGRAM.run(argv, export)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
