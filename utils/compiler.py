"""Where torch.compile keeps its results, so that the next launch need not compile again."""

import os
from pathlib import Path


def keep_results() -> None:
    """Keep compiled kernels in the user's cache folder, unless TORCHINDUCTOR_CACHE_DIR names another.

    torch's own default lies in the temporary folder, which a cluster empties after each job. A home that all machines
    share also shares the results; they are keyed by network, versions and GPU. A folder that cannot be written
    leaves torch's default.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "brisk" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
