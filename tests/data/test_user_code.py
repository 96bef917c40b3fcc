"""`--transform` and `--dali-plugin`: users' functions and operators in real DALI graphs, and what is refused."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pipelines
from tests.conftest import resolved
from tests.harness import ROOT
from utils.data.augmentation.user_code import check_user_code, code_identity, load_user_code
from utils.data.formats.folder import scan_splits
from utils.data.loaders.sampler import RandomSampler
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.options.resolved import ResolvedConfig

BASE = resolved(batch_size=8, image_size=32, val_resize=36, workers=2, prefetch=2)
EXAMPLES = ROOT / "examples"
Write = Callable[[str], ResolvedConfig]

# Bodies of `def f(images, config):`, below these imports, from line 6 on.
HEAD = """import numpy as np
from nvidia.dali import fn, types
def broken(image):
    raise ValueError("no\\nluck")
def f(images, config):
"""
INVERT = "    return types.Constant(255, dtype=types.UINT8) - images\n"
PYTHON = "    return fn.python_function(images.cpu(), function=lambda image: 255 - image)\n"
RANDOM = """    if fn.random.coin_flip():
        images = fn.brightness_contrast(images, brightness=fn.random.uniform(range=[0.5, 1.5]))
    return fn.noise.shot(images, factor=fn.random.uniform(range=[0, 20]))
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file with the function `f`; returns a configuration that names it."""

    def write(body: str) -> ResolvedConfig:
        path = tmp_path / "user.py"
        path.write_text(HEAD + body)
        config = dataclasses.replace(BASE, transform=f"{path}:f")
        load_user_code(config)
        return config

    return write


def batches(config: ResolvedConfig, data: Path, env: DistEnv, count: int = 3) -> list[Tensor]:
    train, _ = scan_splits(data)
    stream = pipelines.create_train_loader(config, train, RandomSampler(len(train), 8), env)
    images = [next(stream).images.clone() for _ in range(count)]
    stream.close()
    return images


REFUSED = {
    "no return": ("    pass\n", "returns nothing instead of images, a single DataNode"),
    "two": ("    return images, images\n", "returns a tuple instead of images"),
    "float": ("    return images * 1.5\n", "returns float images instead of uint8 (fn.cast changes that)"),
    "size": ("    return fn.resize(images, size=[4, 4])\n", "images of shape (4, 4, 3) instead of (32, 32, 3)"),
    "at times": (
        "    if fn.random.coin_flip():\n        images = fn.resize(images, size=[4, 4])\n    return images\n",
        "images of shape (4, 4, 3) instead of (32, 32, 3)",
    ),
    "size of a schedule": ("    return fn.resize(images, size=[32, 32])\n", "(32, 32, 3) instead of (48, 48, 3)"),
    "layout": ("    return fn.transpose(images, perm=[2, 0, 1])\n", "the layout CHW instead of HWC"),
    "Python error": ("    return images + config.nothing\n", "user.py:6: AttributeError: 'ResolvedConfig' object has"),
    "DALI's error": ("    x = 1\n    return fn.resize(images, size='a')\n", "user.py:7: ValueError: could not convert"),
    "unknown option": ("    return fn.resize(images, nothing=1)\n", 'user.py:6: KeyError: \'Argument "nothing"'),
    "error while it runs": (
        "    return fn.slice(images, start=[99], shape=[8], axes=[0])\n",
        "user.py:6: Slice can't be placed out of bounds",
    ),
    "error in Python while it runs": (
        "    return fn.python_function(images, function=broken)\n",
        "fails, {}/user.py:4: ValueError: no; correct it",
    ),
    "source that does not resume": (
        "    zeros = np.zeros((64, 32, 32, 3), np.uint8)\n"
        "    return images + fn.external_source(source=iter([zeros] * 9), dtype=types.UINT8)\n",
        "reads from a source whose position DALI's checkpoints do not hold",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_does_not_fit_is_refused(write: Write, tmp_path: Path, cpu: DistEnv, name: str) -> None:
    body, words = REFUSED[name]
    config = dataclasses.replace(write(body), resize_schedule="0:32,3:48" if name.startswith("size of") else "")
    with pytest.raises(UserError) as refused:
        check_user_code(config, cpu)
    assert f"--transform {tmp_path}/user.py:f: " in str(refused.value)
    assert words.format(tmp_path) in str(refused.value)
    assert str(refused.value).count("\n") == 0


UNREADABLE = {
    "syntax": ("x = (\n", "user.py:1: SyntaxError: '(' was never closed; correct it"),
    "import": ("\nimport nothing_like_it\n", "user.py:2: ModuleNotFoundError: No module named 'nothing_like_it'"),
    "error": ("\n\nraise ValueError('a\\nb')\n", "user.py:3: ValueError: a; correct it"),
    "exit": ("import sys\nsys.exit(3)\n", "user.py:2: SystemExit: 3"),
    "binary": ("\0", "SyntaxError: source code string cannot contain null bytes"),
    "no function": ("f = 3\n", "user.py has no function f"),
    "one argument": ("def f(images): pass\n", "f must take two arguments, images and config"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_does_not_load_is_refused(tmp_path: Path, cpu: DistEnv, name: str) -> None:
    content, words = UNREADABLE[name]
    (tmp_path / "user.py").write_text(content)
    with pytest.raises(UserError) as refused:
        check_user_code(dataclasses.replace(BASE, transform=f"{tmp_path}/user.py:f"), cpu)
    assert words in str(refused.value)
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize("body", [INVERT, PYTHON], ids=["operators", "python_function"])
def test_images_are_transformed_after_the_crop(write: Write, data: Path, cpu: DistEnv, body: str) -> None:
    config = write(body)
    check_user_code(config, cpu)
    plain = batches(dataclasses.replace(config, transform=None), data, cpu)
    for before, after in zip(plain, batches(config, data, cpu), strict=True):
        assert torch.equal(255 - before, after)


@pytest.mark.slow  # an error of a transform in the proxy: below
def test_the_proxy_transforms_too(write: Write, data: Path, cpu: DistEnv) -> None:
    body = "    return fn.python_function(images, function=lambda image: image // 128 * 255)\n"
    for images in batches(dataclasses.replace(write(body), loader="proxy"), data, cpu):
        assert set(images.flatten().tolist()) == {0, 255}


def test_the_policy_comes_after(write: Write, data: Path, cpu: DistEnv) -> None:
    """Of black images a policy makes others, where it inverts them."""
    config = dataclasses.replace(write("    return images * np.uint8(0)\n"), augment="autoaugment")
    assert any(images.any() for images in batches(config, data, cpu, 6))


def test_validation_images_are_not_changed(write: Write, data: Path, cpu: DistEnv) -> None:
    _, val = scan_splits(data)
    config = write(INVERT)
    one, other = (
        next(iter(pipelines.create_val_loader(each, val, cpu)))
        for each in (config, dataclasses.replace(config, transform=None))
    )
    assert torch.equal(one.images, other.images)


def test_random_draws_follow_the_seed_and_resume(write: Write, data: Path, cpu: DistEnv) -> None:
    config, (train, _) = write(RANDOM), scan_splits(data)
    sampler = RandomSampler(len(train), 8)
    stream = pipelines.create_train_loader(config, train, sampler, cpu)
    seen, states = [], []
    for _ in range(12):
        states.append(stream.state())
        seen.append(next(stream).images.clone())
    for cut in (3, 5, 7):
        resumed = pipelines.create_train_loader(config, train, sampler, cpu, cut, states[cut])
        for expected in seen[cut : cut + 5]:
            assert torch.equal(next(resumed).images, expected), cut
    for expected, other in zip(seen, batches(config, data, cpu), strict=False):
        assert torch.equal(expected, other)
    differing = batches(dataclasses.replace(config, seed=1), data, cpu, 1)
    assert not torch.equal(seen[0], differing[0])


@pytest.mark.parametrize("loader", ["dali", "proxy"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("        images = fn.resize(images, size=[4, 4])\n", "returns images of another shape than (32, 32, 3)"),
        ("        images = fn.python_function(images, function=broken)\n", "user.py:4: ValueError: no;"),
    ],
    ids=["shape", "error"],
)
def test_an_error_that_only_real_images_show(
    write: Write, data: Path, cpu: DistEnv, loader: str, body: str, words: str
) -> None:
    config = write(f"    if fn.reductions.mean(fn.cast(images, dtype=types.FLOAT)) < 120:\n{body}    return images\n")
    config = dataclasses.replace(config, loader=loader)  # type: ignore[arg-type]
    check_user_code(config, cpu)  # the mean of what it is tried on is 127
    with pytest.raises(UserError) as failed:
        batches(config, data, cpu)
    assert str(failed.value).startswith(f"rank 0: --transform {config.transform}: ")
    assert words in str(failed.value)


def test_the_identity_is_of_name_and_content(write: Write, tmp_path: Path) -> None:
    config = write(INVERT)
    before = code_identity(config)
    (tmp_path / "other").mkdir()
    moved = Path(tmp_path / "user.py").rename(tmp_path / "other" / "moved.py")
    assert code_identity(dataclasses.replace(config, transform=f"{moved}:f")) == before
    assert code_identity(config) == before, "of what this launch has loaded"
    assert code_identity(write(PYTHON)) != before
    assert code_identity(BASE) == {"--transform": None, "--dali-plugin": None}


# ---------------------------------------------------------------------------------------------------------------------
# The examples


@pytest.mark.parametrize("name", ["grayscale", "blur", "grayscale_and_blur"])
def test_the_example_changes_some_images(data: Path, cpu: DistEnv, name: str) -> None:
    config = dataclasses.replace(BASE, transform=f"{EXAMPLES}/transform.py:{name}")
    check_user_code(config, cpu)
    before = torch.cat(batches(dataclasses.replace(config, transform=None), data, cpu, 8))
    after = torch.cat(batches(config, data, cpu, 8))
    changed = (before != after).flatten(1).any(dim=1)
    assert 0 < changed.sum() < len(changed)
    if name == "grayscale":
        gray = (after.int() - after.int().roll(1, dims=1)).abs().flatten(1).amax(dim=1) <= 1
        assert torch.equal(gray, changed)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's operator, compiled. Needs g++, as torch.compile does on a CPU: without it, tests here fail."""
    folder = tmp_path_factory.mktemp("plugin")
    environ = os.environ | {"BRISK_PYTHON": sys.executable}
    built = subprocess.run([EXAMPLES / "plugin" / "build.sh", folder], env=environ, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    return folder / "libsolarize.so"


@pytest.mark.slow  # compiles
def test_the_plugins_operator_is_used(data: Path, cpu: DistEnv, plugin: Path) -> None:
    transform = f"{EXAMPLES}/plugin/transform.py:solarize"
    config = dataclasses.replace(BASE, transform=transform, dali_plugin=str(plugin))
    check_user_code(config, cpu)
    identity = code_identity(config)["--dali-plugin"]
    assert identity is not None
    assert identity.startswith("SHA-256 ")
    before, after = (
        torch.cat(batches(each, data, cpu)) for each in (dataclasses.replace(config, transform=None), config)
    )
    for one, other in zip(before.int(), after.int(), strict=True):
        inverted = one != other
        assert torch.equal(other[inverted], 255 - one[inverted])
        assert not inverted.any() or one[inverted].min() >= one[~inverted].max(), "from a threshold on"
    assert (before != after).any()
    assert (before == after).any()


@pytest.mark.parametrize(
    ("content", "words"), [(None, "no such file"), (b"text", "does not load (file too short)")], ids=["none", "text"]
)
def test_a_library_that_does_not_load_is_refused(
    write: Write, tmp_path: Path, cpu: DistEnv, content: bytes | None, words: str
) -> None:
    path = tmp_path / "lib.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"^--dali-plugin .*/lib\.so: ") as refused:
        check_user_code(dataclasses.replace(write(INVERT), dali_plugin=str(path)), cpu)
    assert words in str(refused.value)
