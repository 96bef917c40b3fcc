"""What follows from `--task`, whether an image has one class or any number, where it was left open."""

from typing import Any

from utils.errors import UserError
from utils.figures import FIGURES, MAIN_FIGURE, Task
from utils.options.config import TrainConfig
from utils.options.losses import default_loss
from utils.options.validation import check_loss


def resolve_task(config: TrainConfig, task: Task) -> dict[str, Any]:
    """The task, and the loss, the smoothing and the figure of the best epoch that were not given.

    Raises:
        UserError: on all ranks: a flag is for the other task.
    """
    loss, best_by = config.loss or default_loss(task), config.best_by or MAIN_FIGURE[task]
    try:
        check_loss(config, loss, task)
    except UserError as error:
        raise UserError(str(error), on_all_ranks=True) from None
    if task not in FIGURES[best_by].tasks:
        raise UserError(
            f"--best-by {best_by} with --task {task}: there is no such figure; give {MAIN_FIGURE[task]}",
            on_all_ranks=True,
        )
    of_one = {"--eval-classes present": config.eval_classes == "present", "--real-labels": config.real_labels}
    for given in (name for name, is_given in of_one.items() if is_given and task == "multilabel"):
        raise UserError(f"{given} with --task {task}: is of images with one class; leave it out", on_all_ranks=True)
    smoothing = 0.1 if task == "multiclass" else 0.0
    return {
        "task": task,
        "loss": loss,
        "label_smoothing": smoothing if config.label_smoothing is None else config.label_smoothing,
        "best_by": best_by,
    }
