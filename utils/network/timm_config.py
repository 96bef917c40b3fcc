"""timm's config.json beside a file of weights: architecture, class names, and how the weights want their images."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from timm.models import PretrainedCfg

from utils.errors import UserError, first_line
from utils.options.arguments import format_model_arguments


def read_timm_config(weights: Path, option: str = "--pretrained") -> dict[str, Any]:
    """What the config.json beside `weights` says of them; {} where there is none, or one of another program.

    `option` is the flag that names them, for messages.

    Returns:
        `arch`, `classes` (names in label order, or None), `normalization` and `model_args` (None for none), as a
        checkpoint of Brisk has them, and `timm_settings`, a PretrainedCfg. Of transformers' own networks `program`
        alone, the name of their class.

    Raises:
        UserError: the file is damaged.
    """
    path = weights.parent / "config.json"
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
        if not isinstance(content, dict) or "pretrained_cfg" not in content:
            classes = content.get("architectures") if isinstance(content, dict) else None
            return {"program": f"transformers' {classes[0]}"} if classes else {}
        known = {field.name for field in dataclasses.fields(PretrainedCfg)}
        settings = PretrainedCfg(**{name: value for name, value in content["pretrained_cfg"].items() if name in known})
        return {
            "arch": content["architecture"],
            "classes": content.get("label_names"),
            "normalization": {"mean": settings.mean, "std": settings.std},
            "timm_settings": settings,
            "model_args": format_model_arguments(content.get("model_args") or {}),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{option} {weights}: config.json beside it is not timm's ({first_line(error, 200)}); repair or remove it"
        ) from None
