"""What a run needs later is tried at its start: files, user code, room for batches."""

from utils.data.augmentation.user_code import check_user_code
from utils.data.dali import dali_device
from utils.data.images.manifest import Manifest
from utils.data.reading.decoding import decoder_of
from utils.data.reading.sample import check_sample
from utils.data.splits.selection import Splits, check_files
from utils.distributed.collective import collective
from utils.distributed.collectives import all_gather_object, sync_errors
from utils.distributed.group import DistEnv
from utils.distributed.shared_memory import check_shared_memory
from utils.errors import UserError
from utils.figures import OF_TWO_CLASSES
from utils.options.resolved import ResolvedConfig
from utils.text import count
from utils.training.settings.class_weights import class_weights, weights_identity


@collective
def check_start(config: ResolvedConfig, listed: Splits, env: DistEnv, resumes: bool) -> None:
    """Raise UserError on all ranks for what would end the run later, or spoil it; `resumes` goes on with its images."""
    check_files(listed, config.data_dir, env)
    with sync_errors(env):
        if env.is_main and not resumes and config.bad_files == "error":  # else all images are looked at
            check_sample(listed["train"], decoder_of(config.loader, dali_device(env)))
    check_best_by(config.best_by, config.num_classes, listed.get("val"))
    with sync_errors(env):
        class_weights(config, listed["train"])
        identity = tuple(weights_identity(config).items())
    if len(set(all_gather_object(identity, env))) > 1:
        raise UserError(
            f"--class-weights {config.class_weights}: not the same file on all ranks; give all the same",
            on_all_ranks=True,
        )
    check_user_code(config, env)
    num_val = len(listed["val"]) if "val" in listed else round(config.held_out * len(listed["train"]))
    check_shared_memory(config, num_val, env)


def check_best_by(best_by: str, num_classes: int, val: Manifest | None) -> None:
    """Raise UserError where evaluations would not have the figure `--best-by`; `val` is None if it is not known yet."""
    if best_by == "map" and val is not None and not val.class_counts().any():
        raise UserError(
            f"--best-by map: no image of {val.title} has a label; add some, or give --best-by loss", on_all_ranks=True
        )
    if best_by not in OF_TWO_CLASSES:
        return
    if num_classes != 2:
        raise UserError(
            f"--best-by {best_by}: is of two classes, and the network has {count(num_classes, 'class')}; give "
            "macro_recall or another figure",
            on_all_ranks=True,
        )
    if val is not None and len(set(val.labels.tolist())) < 2:
        raise UserError(
            f"--best-by {best_by}: needs validation images of both classes, and {val.title} has only "
            f"{val.classes[int(val.labels[0])]}; add some, or give another figure",
            on_all_ranks=True,
        )
