"""What a run needs later is tried at its start: files, user code, room for batches."""

from utils.data.augmentation.user_code import check_user_code
from utils.data.splits.selection import Splits, check_files
from utils.distributed.collective import collective
from utils.distributed.group import DistEnv
from utils.distributed.shared_memory import check_shared_memory
from utils.options.resolved import ResolvedConfig


@collective
def check_start(config: ResolvedConfig, listed: Splits, env: DistEnv) -> None:
    """Raise UserError on all ranks for what would end the run later."""
    check_files(listed, config.data_dir, env)
    check_user_code(config, env)
    num_val = len(listed["val"]) if "val" in listed else round(config.val_fraction * len(listed["train"]))
    check_shared_memory(config, num_val, env)
