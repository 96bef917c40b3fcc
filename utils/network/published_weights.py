"""timm's published weights: what is known of them, and whether this machine can get them."""

import os
import urllib.request

import timm
import timm.data
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError

from utils.errors import UserError, first_line
from utils.network.weight_files import Weights

HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # of a repository of the Hugging Face hub, in timm's order
WAIT = 10.0  # seconds for an answer


def published_weights(arch: str) -> Weights:
    """What is known of timm's own weights: class names only of ImageNet and its subsets."""
    settings = timm.get_pretrained_cfg(arch)
    subset = timm.data.infer_imagenet_subset(settings.to_dict()) if settings is not None else None
    classes = tuple(timm.data.ImageNetInfo(subset).label_names()) if subset else None
    return Weights(f"timm's {arch}", classes=classes)


def require_published(arch: str, option: str = "--pretrained") -> None:
    """Raise UserError, after one try, unless timm's weights for `arch` are in its cache or can be downloaded.

    timm tries again for a minute and more, and prints each try. `option` is the flag that wants them, for messages.
    """
    settings = timm.get_pretrained_cfg(arch)
    if settings is None or not settings.has_weights:
        raise UserError(f"{option}: timm has no weights for {arch}; leave it out, or give a file")
    repo, _, revision = (settings.hf_hub_id or "").partition("@")
    url = hf_hub_url(repo, HUB_FILES[0], revision=revision or None) if repo else str(settings.url)
    if _is_cached(repo, revision, str(settings.url)):
        return
    try:
        if repo:
            get_hf_file_metadata(url, timeout=WAIT)
        else:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=WAIT).close()
    except EntryNotFoundError:
        return  # the hub answers, and has the weights under another name, which timm knows
    except Exception as error:  # of the HTTP client, which depends on the version of huggingface_hub
        variant = f"{arch.partition('.')[0]}.{settings.tag}" if settings.tag else arch
        file = variant + os.path.splitext(url)[1]
        given = f"--arch {variant} --pretrained {file}" if option == "--pretrained" else f"{option} {file}"
        raise UserError(
            f"{option}: timm's weights {variant} are not in the cache, and cannot be downloaded "
            f"({first_line(error).rstrip('.')}); on a machine with a network, curl -fLo {file} {url} gets them: copy "
            f"the file here, and give {given}"
        ) from error


def _is_cached(repo: str, revision: str, url: str) -> bool:
    """Whether timm would find the weights in the cache of the hub, or in torch's, which it used before."""
    if repo and any(
        isinstance(try_to_load_from_cache(repo, name, revision=revision or None), str) for name in HUB_FILES
    ):
        return True
    if repo and "TIMM_USE_OLD_CACHE" not in os.environ:
        return False
    return bool(url) and os.path.exists(os.path.join(torch.hub.get_dir(), "checkpoints", os.path.basename(url)))
