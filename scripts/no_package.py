"""The build backend of `pip install .`, which says that there is no package to build."""

import sys
from typing import NoReturn


def build_wheel(*arguments: object, **settings: object) -> NoReturn:
    """End pip's process with one line; pip has called one of its hooks."""
    sys.exit(
        "Brisk is a checkout, not a package: pip install -r requirements.txt -c constraints.txt, then python train.py"
    )


build_editable = build_sdist = build_wheel
get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = build_wheel
prepare_metadata_for_build_wheel = prepare_metadata_for_build_editable = build_wheel
