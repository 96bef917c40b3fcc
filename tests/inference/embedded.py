"""Files of embeddings as predict.py writes them, with features of the caller's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_embeddings(folder: Path, features: Any, targets: Sequence[str], **network: Any) -> Path:
    """Write embeddings.npy and the files beside it.

    Args:
        features: float32 (num_images, width).
        targets: class of each image, "" where it is not known.
        network: what is another in embeddings.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "embeddings.npy", np.asarray(features, dtype=np.float32))
    rows = "".join(f"{row}.jpg,{target},\n" for row, target in enumerate(targets))
    (folder / "embeddings.csv").write_text(f"path,target,error\n{rows}")
    facts: dict[str, Any] = {"network": {"arch": "test_resnet", "step": 1} | network, "classes": [], "top1": None}
    (folder / "embeddings.json").write_text(json.dumps(facts))
    return folder / "embeddings.npy"
