"""Uploading the files of an export to the Hugging Face hub, in one commit."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from utils.errors import RunFailed, UserError, first_line
from utils.inference.export.trained import Trained
from utils.text import count

CARD = "README.md"


def push(folder: Path, files: Sequence[str], repo: str, trained: Trained) -> str:
    """Upload files, and a model card where there is none; returns the address of the commit.

    A repository that does not exist is made, and is private. The token is the one of `hf auth login`, or HF_TOKEN.

    Args:
        files: names in `folder`.
        repo: OWNER/NAME.

    Raises:
        UserError: the name is none, or the hub refuses it.
        RunFailed: the hub cannot be reached.
    """
    api = HfApi(library_name="brisk")
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        operations = [CommitOperationAdd(name, folder / name) for name in files]
        if not api.file_exists(repo, CARD):
            operations.append(CommitOperationAdd(CARD, model_card(trained).encode()))
        message = f"{trained.config.arch}, {count(trained.config.num_classes, 'class')}"
        return str(api.create_commit(repo, operations, commit_message=message).commit_url)
    except HFValidationError as error:
        raise UserError(f"--push {repo}: {first_line(error, 200)}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        reason = first_line(error, 200)
        if 400 <= status < 500:
            raise UserError(
                f"--push {repo}: the hub refuses it ({reason}); check the name, and the token: hf auth login"
            ) from None
        raise RunFailed(f"--push {repo}: the hub has failed ({reason}); the files are in {folder}") from None
    except Exception as error:  # of the HTTP client, which depends on the version of huggingface_hub
        raise RunFailed(
            f"--push {repo}: the hub cannot be reached ({first_line(error, 200)}); the files are in {folder}"
        ) from error


def model_card(trained: Trained) -> str:
    """What the hub shows, and by which it knows that timm loads the files."""
    config = trained.config
    accuracy = f" On its validation images: {trained.accuracy}." if trained.accuracy else ""
    return (
        "---\nlibrary_name: timm\ntags:\n- image-classification\n- timm\n---\n"
        f"{config.arch} of timm with {count(config.num_classes, 'class')}, trained with Brisk at {config.image_size} "
        f"px.{accuracy}\n"
    )
