"""Feeds on real JPEGs: passes, order, state, errors, and what is left after close."""

import io
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import timm.data
import torch
from torch import Tensor

from pipelines import Feed, create_train_loader
from tests.conftest import NUMBERED, assert_same, number_of, resolved, write_data, write_numbered
from tests.forked import launch_forked, launch_ranks
from utils.data.feed.options import create_config, resolve_options
from utils.data.formats.folder import scan
from utils.data.loaders.sampler import RandomSampler
from utils.distributed.group import DistEnv
from utils.errors import BadFile, UserError
from utils.training.settings.autotune import choose_common_loader_settings

SMALL: dict[str, Any] = {"batch_size": 8, "image_size": 32, "device": "cpu", "workers": 1}
FILES: dict[str, Any] = SMALL | {"cache": "none"}


def copies(batches: Iterable[Any]) -> list[tuple[Tensor, Tensor]]:
    return [(images.clone(), targets.clone()) for images, targets in batches]


def numbers(batches: Iterable[Any]) -> list[int]:
    """Numbers of the images of `write_numbered`."""
    return [number_of(image.float().mean(dim=(1, 2)).tolist()) for images, _ in batches for image in images]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("numbered"))


def test_batches_have_the_promised_form(data: Path) -> None:
    for split in ("train", "val"):
        with Feed(data, split, **SMALL) as feed:
            assert (feed.classes, feed.device) == (("blue", "green", "red"), torch.device("cpu"))
            assert (feed.mean, feed.std) == (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)
            batches = list(feed)
            assert len(batches) == len(feed) == (5 if split == "train" else 6)
        images, targets = batches[0]  # valid after close
        assert (images.shape, images.dtype) == ((8, 3, 32, 32), torch.uint8)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert (targets.shape, targets.dtype) == ((8,), torch.int64)


@pytest.mark.parametrize("cache", ["none", pytest.param("host", marks=pytest.mark.slow)])
def test_training_batches_are_those_of_a_run(data: Path, cpu: DistEnv, cache: Any) -> None:
    options: dict[str, Any] = {"image_size": 32, "seed": 3, "augment": "trivialaugment", "crop_scale": 0.5}
    config = resolved(**options, cache=cache, decode="fused" if cache == "none" else "full")
    manifest = scan(data, "train")
    loader = create_train_loader(config, manifest, RandomSampler(len(manifest), 8, seed=3), cpu)
    with Feed(data, **SMALL | options, cache=cache) as feed:
        for _ in range(2):
            for batch in feed:
                assert_same(tuple(batch), tuple(next(loader)))
    loader.close()


def test_settings_are_those_of_a_run(data: Path, cpu: DistEnv) -> None:
    given, train = create_config(data, "train", {"batch_size": 8}), scan(data, "train")
    feed, run = resolve_options(given, train, cpu), choose_common_loader_settings(given, cpu, None, train)
    names = ("workers", "decode", "hw_decoder_load", "cache", "prefetch")
    assert [getattr(feed, name) for name in names] == [getattr(run, name) for name in names]
    assert feed.hw_decoder_load == 0, "the images are small"


def test_each_for_is_the_next_epoch(numbered: Path) -> None:
    with Feed(numbered, **FILES) as feed:
        epochs = []
        for epoch in range(3):
            assert feed.epoch == epoch
            epochs.append(numbers(feed))
    for epoch, seen in enumerate(epochs):
        assert len(set(seen)) == len(seen) == 8 * (NUMBERED // 8)
        order = RandomSampler(NUMBERED, 8)
        expected = [order.indices(epoch * order.batches_per_epoch + batch) for batch in range(len(feed))]
        manifest = scan(numbered, "train")
        assert seen == [int(Path(manifest.name(int(i))).stem) for batch in expected for i in batch]


def test_set_epoch_is_that_of_distributed_sampler(data: Path) -> None:
    with Feed(data, **FILES) as feed:
        in_a_row = [copies(feed) for _ in range(3)]
    with Feed(data, **FILES) as feed:
        for epoch, expected in enumerate(in_a_row):
            feed.set_epoch(epoch)
            assert_same(copies(feed), expected)
        for _ in range(2):
            feed.set_epoch(0)
            assert_same(copies(feed), in_a_row[0])
        feed.set_epoch(2)  # the same images, drawn again
        jumped = copies(feed)
        assert_same([targets for _, targets in jumped], [targets for _, targets in in_a_row[2]])
        assert feed.epoch == 3
        with pytest.raises(UserError, match="epoch -1"):
            feed.set_epoch(-1)


def test_a_pass_that_was_left_early_is_over(numbered: Path) -> None:
    with Feed(numbered, **FILES) as feed:
        complete = [numbers(feed) for _ in range(3)]
    with Feed(numbered, **FILES) as feed:
        for _ in feed:
            break
        iter(feed)  # takes no batch, so it is no pass
        assert numbers(feed) == complete[1]
        first = iter(feed)
        next(first)
        second = iter(feed)
        next(second)
        with pytest.raises(UserError, match="another pass"):
            next(first)
    with Feed(numbered, "val", **FILES) as feed:
        expected = copies(feed)
        for _ in feed:
            break
        assert_same(copies(feed), expected)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_divide_the_images(numbered: Path, split: Any, world_size: int) -> None:
    seen: Counter[int] = Counter()
    sizes = set()
    for rank in range(world_size):
        with Feed(numbered, split, **FILES | {"batch_size": 4}, rank=rank, world_size=world_size) as feed:
            batches = list(feed)
            assert len(batches) == len(feed)
            sizes.add(len(feed))
            seen.update(numbers(batches))
    if split == "train":
        assert (max(seen.values()), len(seen), len(sizes)) == (1, NUMBERED // (4 * world_size) * 4 * world_size, 1)
    else:
        assert seen == dict.fromkeys(range(5), 1)


def test_a_rank_without_images_has_no_batch(numbered: Path) -> None:
    with Feed(numbered, "val", **FILES, rank=6, world_size=7) as feed:
        assert (len(feed), list(feed), list(feed)) == (0, [], [])
        feed.load_state_dict(feed.state_dict())


def reload(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    ("split", "options"),
    [
        ("train", {"cache": "none", "prefetch": 6}),
        ("train", {"cache": "host"}),
        ("train", {"cache": "none", "rank": 1, "world_size": 2}),
        ("val", {}),
        ("val", {"rank": 1, "world_size": 2}),
    ],
)
def test_a_state_goes_on_bit_for_bit(data: Path, split: Any, options: dict[str, Any]) -> None:
    """At every batch of two epochs, also of a feed that was itself resumed; batches read ahead do not count."""
    options = SMALL | {"batch_size": 4} | options
    with Feed(data, split, **options) as feed:
        states, batches = [feed.state_dict()], []
        for _ in range(2):
            for batch in feed:
                batches += copies([batch])
                states.append(feed.state_dict())
    length = len(feed)
    for at in (0, length - 1, length + 2):
        with Feed(data, split, **options) as resumed:
            resumed.load_state_dict(reload(states[at]))
            assert_same(resumed.state_dict(), states[at])
            assert resumed.epoch == at // length
            found, middle = [], None
            for epoch in range(resumed.epoch, 2):
                resumed.set_epoch(epoch)
                for batch in resumed:
                    found += copies([batch])
                    middle = middle or resumed.state_dict()
            assert_same(found, batches[at:])
            assert middle is not None
            resumed.load_state_dict(middle)
            assert_same(copies(resumed), batches[at + 1 : ((at + 1) // length + 1) * length])


def test_a_state_keeps_the_pixels_that_were_chosen(data: Path) -> None:
    for decode, cache in (("full", "none"), ("fused", "none"), ("full", "host")):
        with Feed(data, **SMALL, decode=decode, cache=cache) as feed:  # type: ignore[arg-type]
            next(iter(feed))
            state = feed.state_dict()
            expected = copies(feed)  # the next epoch
        with Feed(data, **SMALL) as feed:  # leaves both open, and chooses the cache
            feed.load_state_dict(state)
            list(feed)
            later = feed.state_dict()["feed"]
            assert (later["decode"], later["cache"]) == (decode, cache)
            assert_same([targets for _, targets in copies(feed)], [targets for _, targets in expected])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 4}, "batch_size was 8, and is 4"),
        ({"seed": 1}, "seed was 0, and is 1"),
        ({"augment": "randaugment"}, "augment was none, and is randaugment"),
        ({"cache": "host"}, "cache was none, and is host"),
        ({"rank": 1, "world_size": 2}, "world_size was 1, and is 2"),
    ],
)
def test_a_state_of_other_options_is_refused(data: Path, changed: dict[str, Any], message: str) -> None:
    with Feed(data, **FILES) as feed:
        state = feed.state_dict()
    with Feed(data, **FILES | changed) as feed, pytest.raises(UserError, match=f"load_state_dict: {message}"):
        feed.load_state_dict(state)


def test_a_state_without_a_later_option_had_its_default(data: Path) -> None:
    with Feed(data, **FILES) as feed:
        state = feed.state_dict()
        del state["feed"]["balance"]
        feed.load_state_dict(state)
    with Feed(data, **FILES, balance=0.5) as feed, pytest.raises(UserError, match=r"balance was 0\.0, and is 0\.5"):
        feed.load_state_dict(state)


def test_a_state_of_other_images_or_another_rank_is_refused(data: Path, tmp_path: Path) -> None:
    with Feed(data, **FILES, rank=0, world_size=2) as feed:
        state = feed.state_dict()
    with Feed(data, **FILES, rank=1, world_size=2) as feed, pytest.raises(UserError, match="each rank saves"):
        feed.load_state_dict(state)
    other = write_data(tmp_path, train=(14, 14, 14))
    with Feed(other, **FILES, rank=0, world_size=2) as feed, pytest.raises(UserError, match="of other images"):
        feed.load_state_dict(state)
    with Feed(data, **FILES) as feed:
        wrong: Any
        for wrong in ({}, {"feed": {}}, None, {"model": 1}):
            with pytest.raises(UserError, match="not the state of a feed"):
                feed.load_state_dict(wrong)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    bad = Path(scan(data, "train").record(int(RandomSampler(41, 8).indices(4)[3])).name)
    content = bad.read_bytes()
    with Feed(data, **FILES | {"prefetch": 1}) as feed:
        expected, state = copies(feed), {}
    bad.write_bytes(b"<html>".ljust(len(content)))
    with Feed(data, **FILES | {"prefetch": 1}) as feed:
        batches = iter(feed)
        for _ in range(4):
            next(batches)
            state = feed.state_dict()
        with pytest.raises(BadFile, match=f"rank 0: {bad}: .*; delete or replace it$") as caught:
            next(batches)
        assert caught.value.path == str(bad)
        with pytest.raises(UserError, match="reading has failed after the last batch"):
            feed.state_dict()
        bad.write_bytes(content)
        feed.load_state_dict(state)
        assert_same(copies(feed), expected[4:])


def test_only_one_split_is_needed(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    (data / "val").rename(data / "dev")
    (data / "train").rename(data / "fit")
    with Feed(data, **FILES, train_split="fit") as train:
        assert len(train) == 5
        with Feed(data, "val", **FILES, val_split="dev", classes=train.classes) as val:
            assert len(list(val)) == 6


def test_a_closed_feed_says_so(data: Path) -> None:
    feed = Feed(data, **FILES)
    started = iter(feed)
    next(started)
    state = feed.state_dict()
    feed.close()
    assert_same(feed.state_dict(), state)
    feed.close()
    for batches in (started, feed):
        with pytest.raises(UserError, match="the feed is closed"):
            next(iter(batches))


USED = """
import gc, json, os, signal, sys
from pathlib import Path
import torch
from pipelines import Feed

torch.set_num_threads(1)

def process():
    signals = [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())]
    return [dict(os.environ), signals, torch.get_rng_state().tolist(), torch.get_num_threads()]

def used():
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/task")), rss, len(os.listdir("/proc/self/fd"))

before = process()
gc.disable()  # nothing may wait for a garbage collection
figures = []
for number in range(9):
    split, cache = ("train", "val")[number % 2], ("none", "auto")[number // 2 % 2]
    with Feed(sys.argv[1], split, batch_size=8, image_size=64, device="cpu", cache=cache) as feed:
        for images, targets in feed:
            pass
    figures.append(used())
left_open = Feed(sys.argv[1], batch_size=8, image_size=64, device="cpu")
next(iter(left_open))
print(json.dumps([process() == before, figures]))
"""


def test_nothing_is_left_after_close(data: Path) -> None:
    """Threads, memory, open files, and what belongs to the process. A feed that is still open does not hold its end."""
    done = launch_forked(data, program=USED)
    assert (done.status, done.err) == (0, "")
    is_unchanged, figures = json.loads(done.out)
    assert is_unchanged
    threads, memory, files = zip(*figures, strict=True)
    assert threads[-1] == threads[3], threads  # of the first four feeds, each of another kind
    assert files[-1] == files[3], files
    assert memory[-1] - memory[4] < 30e6, [round(each / 1e6) for each in memory]


RANKS = """
import json, os, sys
import torch.distributed as dist
from pipelines import Feed

if sys.argv[2] == "group":
    dist.init_process_group("gloo")
with Feed(sys.argv[1], batch_size=8, image_size=32, device="cpu", cache="none") as feed:
    targets = [each.tolist() for _, each in feed]
with open(f"{sys.argv[3]}/{os.environ['RANK']}", "w") as file:
    json.dump([len(feed), feed.state_dict()["feed"]["rank"], feed.state_dict()["feed"]["world_size"], targets], file)
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.mark.dist
@pytest.mark.parametrize("group", [pytest.param(each, marks=pytest.mark.slow) for each in ("group", "launcher")])
def test_ranks_are_those_of_torchrun(data: Path, tmp_path: Path, group: str) -> None:
    assert [done.status for done in launch_ranks(data, group, tmp_path, program=RANKS)] == [0, 0]
    manifest = scan(data, "train")
    for rank in range(2):
        sampler = RandomSampler(len(manifest), 8, rank=rank, world_size=2)
        expected = [manifest.labels[sampler.indices(batch)].tolist() for batch in range(2)]
        assert json.loads((tmp_path / str(rank)).read_text()) == [2, rank, 2, expected]
