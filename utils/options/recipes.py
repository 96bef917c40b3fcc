"""Recipes: YAML files of train.py's flags, and the config.json of a run, which is one."""

import difflib
from pathlib import Path
from typing import Any

import yaml

from utils.errors import UserError
from utils.options.aliases import PAGE, alias_of
from utils.options.config import flag_fields, flags_with
from utils.options.flags import flag, kinds
from utils.options.resolved import CHOSEN

MAX_LENGTH = 1_000_000  # characters
# Keys that every config.json had before it had CHOSEN, together with those of the launch.
OF_A_RUN = {"output_dir", "checkpoint_steps", "resume", "evaluate", "time_limit"}


def read_run_recipe(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Field name -> value of a YAML (or JSON) recipe; keys may use dashes or underscores.

    A value means what the same text means on the command line; only booleans and null are YAML's. Of a config.json,
    what its run has chosen is left out, unless somebody has changed it. So are flags of the launch in one that does not
    say what was chosen, of an earlier version.

    Returns:
        The values, and those that the run of a config.json has chosen, or may have, where that is not known.

    Raises:
        UserError: unreadable file, unknown key (the closest one is named), a key given twice, or a value that is no
            scalar.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_LENGTH + 1)  # not more: /dev/zero has no end
        if len(text) > MAX_LENGTH:
            raise ValueError(f"more than {MAX_LENGTH:,} characters")
        recipe = yaml.load(text, Loader=_RecipeLoader)
        written = _top_level(text)
    except Exception as error:  # PyYAML raises what its constructors meet, from KeyError to RecursionError
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--config {path}: cannot be read ({reason}); give a YAML file of flags") from None
    if not isinstance(recipe, dict | None):
        raise UserError(f"--config {path}: must be a mapping like 'lr: 0.5', not {type(recipe).__name__}")
    recipe = recipe or {}
    chosen = recipe.pop(CHOSEN) if isinstance(recipe.get(CHOSEN), dict) else None
    fields = {field.name: field for field in flag_fields() if field.name != "config"}
    values: dict[str, Any] = {}
    keys = [key.replace("-", "_") for key, _ in written]
    for key in keys:
        if keys.count(key) > 1:  # YAML would use the last without an error
            raise UserError(f"--config {path}: '{key.replace('_', '-')}' is given twice; keep one")
    for key, value in recipe.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            if meant := alias_of(name, [flag(each) for each in fields]):
                raise UserError(f"--config {path}: unknown key '{key}'; it is {meant} here; {PAGE} has more")
            close = difflib.get_close_matches(name, fields, n=1, cutoff=0.0)
            raise UserError(f"--config {path}: unknown key '{key}'; the closest is '{close[0].replace('_', '-')}'")
        if value is not None and not (name == "pretrained" and value is False):
            as_written = dict(written).get(key, value)  # what "<<" merges is not at the top level
            values[name] = _recipe_value(path, key, value, as_written, kinds(fields[name]))
    return _without_choices(values, recipe, chosen)


def _without_choices(
    values: dict[str, Any], recipe: dict[str, Any], chosen: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `read_run_recipe` returns; `recipe` is as in the file, and `chosen` its part of that name."""
    if chosen is not None:
        found = {name: value for name, value in chosen.items() if name in recipe and recipe[name] == value}
        return {name: value for name, value in values.items() if name not in found}, found
    if not recipe.keys() >= OF_A_RUN:
        return values, {}
    values = {name: value for name, value in values.items() if name not in flags_with(of_launch=True)}
    return values, {name: recipe[name] for name in flags_with(chosen=True) if name in values}


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which a date is text: no flag has a date, and a folder may be called 2026-22-11, which is no date."""


_RecipeLoader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)  # type: ignore[type-var]


def _top_level(text: str) -> list[tuple[str, Any]]:
    """Keys and values as in the file, where a mapping would hold the last of two keys that are the same."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        return []
    return [(str(key.value), value.value) for key, value in node.value]


def _recipe_value(path: Path, key: str, value: Any, as_written: Any, kinds: tuple[Any, ...]) -> Any:
    if key == "pretrained" and value is True:
        return "timm"
    if not isinstance(value, str | int | float) or isinstance(value, bool) != (bool in kinds):
        expected = "true or false" if bool in kinds else "one value"
        raise UserError(f"--config {path}: {key}: {value!r:.80} is not allowed; give {expected}")
    # As text, so that a recipe is held to the same types as the command line (2.5 is no batch size), and as written:
    # YAML would make 83 of the folder 0123, and 90 of the seed 1:30.
    if isinstance(value, bool):
        return value
    # JSON writes a letter beyond U+FFFF as two escapes, which YAML reads as two letters.
    return str(as_written).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
