"""On a real GPU: the batches that the loaders return. Run by scripts/gpu_check.sh."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import pipelines
from tests import shards
from tests.conftest import assert_same, resolved
from tests.harness import ROOT
from tests.test_pipelines import RECIPES
from utils.data.augmentation.user_code import load_user_code
from utils.data.formats.folder import scan_splits
from utils.data.images.manifest import synthetic
from utils.data.loaders.dali_loader import DaliTrainLoader
from utils.data.loaders.memory_loader import MemoryTrainLoader, MemoryValLoader
from utils.data.loaders.sampler import RandomSampler, create_sampler
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.network.augment import BatchAugment, Normalize
from utils.options.policies import POLICIES
from utils.options.resolved import ResolvedConfig
from utils.targets import Targets

pytestmark = pytest.mark.gpu


def config_for(loader: str, **values: object) -> ResolvedConfig:
    base = resolved(
        batch_size=8, image_size=32, val_resize=36, workers=2, decode="fused", hw_decoder_load=0.65, prefetch=4
    )
    return dataclasses.replace(base, **({"loader": loader} | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loader", "decode", "augment"),
    [(loader, decode, augment) for loader in ("dali", "stock") for decode in ("fused", "full") for augment in POLICIES]
    + [("torch", "fused", "none"), ("proxy", "fused", "none"), ("synthetic", "fused", "none")],
)
def test_first_batch_is_on_the_gpu_in_channels_last(
    data: Path, gpu: DistEnv, loader: str, decode: str, augment: str
) -> None:
    config = config_for(loader, decode=decode, augment=augment)
    train, _ = scan_splits(data)
    sampler = RandomSampler(len(train), config.batch_size)
    stream = pipelines.create_train_loader(config, train, sampler, gpu)
    images, targets = next(stream)
    assert images.shape == (8, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert images.device == gpu.device
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert targets.dtype == torch.int64
    assert targets.device == gpu.device
    if loader not in ("stock", "synthetic"):
        assert targets.tolist() == train.labels[sampler.indices(0)].tolist()
    assert images.float().std() > 10, "an image, not a blank"
    stream.close()


@pytest.mark.parametrize(("loader", "cache"), [("dali", "none"), ("stock", "none"), ("dali", "gpu")])
def test_a_batch_is_not_overwritten_before_the_device_has_read_it(
    data: Path, gpu: DistEnv, loader: str, cache: str
) -> None:
    """The host drops each batch while the kernels that read it still wait; nothing must write over it."""
    train, _ = scan_splits(data)
    config, sampler = config_for(loader, cache=cache, decode="full"), RandomSampler(len(train), 8)
    sums = []
    for lag in (0, 20_000_000):  # cycles, about 10 ms
        stream = pipelines.create_train_loader(config, train, sampler, gpu)
        found = torch.zeros(100, dtype=torch.int64, device=gpu.device)
        for step in range(100):
            batch = next(stream)
            torch.cuda._sleep(lag)  # type: ignore[no-untyped-call]
            found[step] = batch.images.long().sum()
            del batch
            if lag == 0:
                torch.cuda.synchronize()
        sums.append(found.tolist())
    assert sums[0] == sums[1]


def test_the_stock_loader_resumes_and_mirrors(data: Path, gpu: DistEnv) -> None:
    """Bit for bit, at an epoch's end and within; and its last operator does no more than mirror."""
    train, _ = scan_splits(data)
    sampler = RandomSampler(len(train), 8)
    stream, mirrored = (
        pipelines.create_train_loader(config_for("stock", hflip=hflip), train, sampler, gpu) for hflip in (0.0, 1.0)
    )
    batches, states = [], []
    for _ in range(12):
        states.append(stream.state())
        batches.append(next(stream))
        assert torch.equal(batches[-1].images.flip(3), next(mirrored).images)
    for cut in (0, 3, 5, 7):
        resumed = pipelines.create_train_loader(config_for("stock", hflip=0.0), train, sampler, gpu, cut, states[cut])
        for expected in batches[cut : cut + 5]:
            found = next(resumed)
            assert torch.equal(found.targets, expected.targets)
            assert torch.equal(found.images, expected.images)


@pytest.mark.parametrize("mix", [{"mixup": 0.2}, {"cutmix": 1.0}])
def test_mixed_batches_stay_in_channels_last(gpu: DistEnv, mix: dict[str, float]) -> None:
    config = config_for("synthetic", **mix)
    normalize = Normalize((0.5,) * 3, (0.5,) * 3, torch.bfloat16, gpu.device)
    batch = next(pipelines.create_train_loader(config, synthetic(64, 10), RandomSampler(64, 8), gpu))
    images, targets = BatchAugment(config, normalize, Targets(10), gpu.device)(*batch)
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert targets.shape == (8, 10)


@pytest.mark.parametrize(("decode", "cache"), [("fused", "none"), ("full", "none"), ("full", "gpu"), ("full", "host")])
@pytest.mark.parametrize("flags", [*[{"augment": name} for name in POLICIES], *RECIPES], ids=str)
def test_dali_continues_bit_for_bit(data: Path, gpu: DistEnv, decode: str, cache: str, flags: dict[str, Any]) -> None:
    config = config_for("dali", decode=decode, cache=cache, **flags)
    train, _ = scan_splits(data)
    sampler = create_sampler(config, train, gpu)
    stream = pipelines.create_train_loader(config, train, sampler, gpu)
    for _ in range(3):
        next(stream)
    state = stream.state()
    expected = [next(stream).images.cpu() for _ in range(6)]  # across the end of an epoch of 5 batches
    resumed = pipelines.create_train_loader(config, train, sampler, gpu, 3, state)
    for index, images in enumerate(expected):
        assert torch.equal(next(resumed).images.cpu(), images), index


def test_cached_images_are_those_of_the_files(data: Path, gpu: DistEnv) -> None:
    """Those that DALI crops; of the GPU's memory it does so where a policy or a transform follows."""
    train, _ = scan_splits(data)
    files, on_gpu, on_host = (
        DaliTrainLoader(
            config_for("dali", decode="full", cache=cache),
            train,
            RandomSampler(len(train), 8),
            gpu,
            0,
            None,
            pipelines.train_pipeline,
        )
        for cache in ("none", "gpu", "host")
    )
    for _ in range(11):  # two epochs
        (images, targets), cached, other = next(files), next(on_gpu), next(on_host)
        assert torch.equal(cached.images, other.images)
        assert targets.tolist() == cached.targets.tolist() == other.targets.tolist()
        # Which decoder takes an image depends on its batch, and they round differently.
        assert (images.int() - cached.images.int()).abs().float().mean() < 1


IN_MEMORY: dict[str, Any] = {"decode": "full", "cache": "gpu"}  # of the GPU, where one kernel makes a batch


def open_from_memory(
    data: Path, env: DistEnv, first: int = 0, rank: int = 0, world_size: int = 1, **values: Any
) -> MemoryTrainLoader:
    train, _ = scan_splits(data)
    batch_size = 8 // world_size
    sampler = RandomSampler(len(train), batch_size, rank=rank, world_size=world_size)
    config = config_for("dali", **IN_MEMORY, batch_size=batch_size, **values)
    stream = pipelines.create_train_loader(config, train, sampler, env, first)
    assert isinstance(stream, MemoryTrainLoader)
    return stream


@pytest.mark.parametrize("image_size", [16, 32, 64, 224])
def test_batches_from_the_gpus_memory_are_those_of_the_cpu(
    data: Path, gpu: DistEnv, cpu: DistEnv, image_size: int
) -> None:
    """Crops and flips to the pixel, colors within 1 of 255, where both have the same decoded images."""
    on_gpu, on_cpu = (open_from_memory(data, env, image_size=image_size) for env in (gpu, cpu))
    decoded = on_gpu._images.pixels.cpu()
    used = int(on_gpu._images.starts[-1])  # what lies behind is not initialized
    # Decoders of the GPU and of the CPU interpolate colors differently: 8 here. The next image is 40 off.
    assert (decoded[:used].int() - on_cpu._images.pixels[:used].int()).abs().float().mean() < 20
    on_cpu._images.pixels = decoded
    for _ in range(11):  # two epochs
        ours, theirs = next(on_gpu), next(on_cpu)
        assert ours.images.device == ours.targets.device == gpu.device
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        assert ours.targets.tolist() == theirs.targets.tolist()
        difference = (ours.images.cpu().int() - theirs.images.int()).abs()
        assert difference.max() <= 1
        assert difference.float().mean() < 0.01


def test_a_resume_from_the_gpus_memory_needs_no_state(data: Path, gpu: DistEnv) -> None:
    """Bit for bit: in mid-epoch, at its end, and on 2 and 4 processes, which share each batch."""
    whole = open_from_memory(data, gpu)
    batches = [next(whole).images for _ in range(10)]
    assert whole.state() == {}
    for cut in (3, 5, 7):
        resumed = open_from_memory(data, gpu, cut)
        for expected in batches[cut:]:
            assert torch.equal(next(resumed).images, expected)
    for world_size in (2, 4):
        ranks = [open_from_memory(data, gpu, 3, rank, world_size) for rank in range(world_size)]
        for expected in batches[3:]:
            assert torch.equal(torch.cat([next(rank).images for rank in ranks]), expected)


def test_a_run_that_dali_has_fed_goes_on_so(data: Path, gpu: DistEnv) -> None:
    """Bit for bit, from a state that holds the random draws of DALI's pipelines."""
    train, _ = scan_splits(data)
    config, sampler = config_for("dali", **IN_MEMORY), RandomSampler(len(train), 8)
    before = DaliTrainLoader(config, train, sampler, gpu, 0, None, pipelines.train_pipeline)
    for _ in range(3):
        next(before)
    resumed = pipelines.create_train_loader(config, train, sampler, gpu, 3, before.state())
    for _ in range(4):
        assert torch.equal(next(resumed).images, next(before).images)


def test_policies_of_images_on_the_gpu_are_dalis(data: Path, gpu: DistEnv) -> None:
    """And a schedule changes from one to the other."""
    train, _ = scan_splits(data)
    sampler = RandomSampler(len(train), 8)
    config = config_for("dali", **IN_MEMORY, augment_schedule="0:randaugment,1:none")
    stream = pipelines.create_train_loader(config, train, sampler, gpu)
    for _ in range(sampler.batches_per_epoch):
        assert "dali" in stream.state()
        next(stream)
    for _ in range(2):
        assert stream.state() == {}
        assert next(stream).images.float().std() > 10


def test_images_that_do_not_fit_on_the_gpu_are_refused(tmp_path: Path, gpu: DistEnv) -> None:
    for number in range(12):  # 144 MB
        path = tmp_path / "train" / "only" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2000, 2000)).save(path)
    (tmp_path / "val" / "only").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "val" / "only" / "0.jpg")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4, gpu.device)  # less than 15 MB
    try:
        with pytest.raises(UserError, match=r"--cache gpu: the GPU's memory ran out .*; use --cache host"):
            open_from_memory(tmp_path, gpu)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu.device)


@pytest.mark.parametrize("write", [shards.write_webdataset, shards.write_tfrecord, shards.write_lmdb])
@pytest.mark.parametrize(("decode", "cache"), [("fused", "none"), ("full", "none"), ("full", "gpu")])
def test_shards_give_the_bits_of_the_folder(
    data: Path, gpu: DistEnv, tmp_path: Path, write: Callable[[Path, Path], Path], decode: str, cache: str
) -> None:
    options: dict[str, Any] = {"batch_size": 8, "image_size": 32, "workers": 2, "decode": decode, "cache": cache}
    for split in ("train", "val"):
        batches = []
        for source in (data, write(data, tmp_path / split)):
            with pipelines.Feed(source, split, **options) as feed:
                assert feed.device == gpu.device
                batches.append([(images.clone(), targets.clone()) for _ in range(2) for images, targets in feed])
        assert len(batches[0]) == (10 if split == "train" else 12)
        assert_same(batches[1], batches[0])


@pytest.mark.parametrize("decode", ["fused", "full"])
def test_a_transform_changes_images_on_the_gpu_and_resumes(data: Path, gpu: DistEnv, decode: str) -> None:
    plain = config_for("dali", decode=decode)
    config = dataclasses.replace(plain, transform=f"{ROOT}/examples/transform.py:grayscale_and_blur")
    load_user_code(config)
    train, _ = scan_splits(data)
    sampler = RandomSampler(len(train), 8)
    stream, unchanged = (pipelines.create_train_loader(each, train, sampler, gpu) for each in (config, plain))
    states, batches, changed = [], [], 0
    for _ in range(7):
        states.append(stream.state())
        images = next(stream).images
        assert images.device == gpu.device
        batches.append(images.clone())
        changed += int((images != next(unchanged).images).any(dim=(1, 2, 3)).sum())
    assert 0.3 < changed / 56 < 0.9  # 0.6 is expected
    resumed = pipelines.create_train_loader(config, train, sampler, gpu, 3, states[3])
    for expected in batches[3:]:
        assert torch.equal(next(resumed).images, expected)


@pytest.mark.parametrize(
    ("interpolation", "val_crop"), [("bilinear", "center"), ("bicubic", "center"), ("bicubic", "squash")]
)
def test_validation_images_are_torchvisions(data: Path, gpu: DistEnv, interpolation: str, val_crop: str) -> None:
    _, val = scan_splits(data)
    configs = [config_for(name, interpolation=interpolation, val_crop=val_crop) for name in ("dali", "torch")]
    ours, theirs = (
        torch.cat([batch.images.cpu() for batch in pipelines.create_val_loader(config, val, gpu)]) for config in configs
    )
    assert len(ours) == len(theirs) == len(val)
    difference = (ours.int() - theirs.int()).abs().float()
    assert difference.mean() < (
        1.5 if interpolation == "bilinear" else 3
    )  # GPU decoders round differently; another crop would be tens off


@pytest.mark.parametrize(("values", "keep"), [(IN_MEMORY, False), ({"decode": "fused"}, True)])
def test_validation_batches_stay_on_the_gpu(data: Path, gpu: DistEnv, values: dict[str, Any], keep: bool) -> None:
    """DALI's, to the last bit, in every pass."""
    _, val = scan_splits(data)
    plain = pipelines.create_val_loader(config_for("dali"), val, gpu)
    expected = [(targets, images.clone()) for images, targets in plain]
    loader = pipelines.create_val_loader(config_for("dali", **values), val, gpu, keep)
    for _ in range(3):
        assert_same([(targets, images) for images, targets in loader], expected)
    assert isinstance(loader, MemoryValLoader)
    assert len(loader._batches) == len(expected)
