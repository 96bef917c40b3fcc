"""Embeddings are timm's own features, to the bit in float32 on the CPU, of networks of every kind of head."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import timm
import torch

import pipelines
from scripts import predict
from tests import damage
from tests.conftest import resolved
from tests.contract import assert_keys
from tests.harness import ROOT, launch, read_checkpoint
from tests.inference.exported import MEAN, STD, write_checkpoint
from utils.distributed.group import DistEnv
from utils.errors import UserError
from utils.inference.embedding_files import read_embeddings
from utils.inference.embeddings import WithEmbeddings, embedding_width
from utils.inference.inputs import files_manifest, list_inputs
from utils.network.augment import Normalize
from utils.options.resolved import ResolvedConfig

# A pool, a token, a layer behind the pool, a norm, two layers; two tokens, two heads, a head of convolutions.
HEADS = (
    "test_resnet", "test_vit", "mobilenetv3_small_050", "test_convnext", "test_mambaout",
    pytest.param("deit_tiny_distilled_patch16_224", marks=pytest.mark.slow),
    pytest.param("levit_128s", marks=pytest.mark.slow),
    pytest.param("vgg11", marks=pytest.mark.slow),
)  # fmt: skip


def run_here(*words: object) -> None:
    assert predict.main([*map(str, words)]) == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("run") / "best.pt")


@pytest.mark.parametrize("arch", HEADS)
def test_features_and_logits_are_timms(arch: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(arch, num_classes=3).eval()
    images = torch.randn(2, *model.pretrained_cfg["input_size"])
    with torch.inference_mode():
        features, logits = WithEmbeddings(model)(images).tensor_split([-3], dim=1)
        assert torch.equal(features, model.forward_head(model.forward_features(images), pre_logits=True))
        assert torch.equal(logits, model(images))
    assert features.shape[1] == model.head_hidden_size


@pytest.mark.parametrize("arch", ["test_resnet", pytest.param("test_vit", marks=pytest.mark.slow)])
def test_the_file_has_timms_features(data: Path, cpu: DistEnv, tmp_path: Path, arch: str) -> None:
    size: dict[str, Any] = {"image_size": 64, "val_resize": 70} if arch == "test_vit" else {}
    path = write_checkpoint(tmp_path / "run" / "best.pt", arch=arch, **size)
    run_here(path, data / "val", "--output-dir", tmp_path / "out", "--output-type", "embedding", "--batch-size", 8)
    found = np.load(tmp_path / "out" / "embeddings.npy")
    saved = read_checkpoint(path.parent, path.name)
    model = timm.create_model(**saved["create_model"])
    model.load_state_dict(saved["model"])
    model.eval().to(memory_format=torch.channels_last)
    images = files_manifest(list_inputs([str(data / "val")]).files, saved["classes"])
    normalize = Normalize(MEAN, STD, dtype=torch.float32, device=cpu.device)
    loader = pipelines.create_val_loader(ResolvedConfig.from_dict(saved["config"]), images, cpu)
    with torch.inference_mode():
        parts = [
            model.forward_head(model.forward_features(normalize(batch.images)), pre_logits=True) for batch in loader
        ]
    assert torch.equal(torch.from_numpy(found), torch.cat(parts))


def test_each_format_has_the_rows_of_predictions(data: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "red").mkdir()
    bad = tmp_path / "red" / "bad.jpg"
    bad.write_bytes(damage.JPEG[:100])
    words = (checkpoint, data / "val", bad, "--batch-size", 8, "--output-dir")
    run_here(*words, tmp_path / "npy")
    expected = (tmp_path / "npy" / "predictions.csv").read_bytes()
    run_here(*words, tmp_path / "npy", "--output-type", "embedding")
    run_here(*words, tmp_path / "parquet", "--output-type", "embedding", "--format", "parquet")
    assert (tmp_path / "npy" / "embeddings.csv").read_bytes() == expected
    array = np.load(tmp_path / "npy" / "embeddings.npy")
    assert (array.dtype, len(array)) == (np.float32, 42)
    assert np.isnan(array[-1]).all()
    rows = list(csv.DictReader(expected.decode().splitlines()))
    table = pyarrow.parquet.read_table(tmp_path / "parquet" / "embeddings.parquet")
    assert table.column_names == [*rows[0], "embedding"]
    assert table["path"].to_pylist() == [row["path"] for row in rows]
    assert table["embedding"].type == pyarrow.list_(pyarrow.float32(), array.shape[1])
    assert table["embedding"].to_pylist() == [*array[:-1].tolist(), None]
    for form, names in (("npy", {"embeddings.csv", "embeddings.npy"}), ("parquet", {"embeddings.parquet"})):
        others = {"embeddings.json", "per_class.csv", "confusion.csv", "min_prob.csv"}
        assert {path.name for path in (tmp_path / form).iterdir()} == names | others, "an earlier result is replaced"
        facts = json.loads((tmp_path / form / "embeddings.json").read_text())
        assert_keys("embeddings.json", facts)
        assert facts["top1"] == pytest.approx(100 * sum(row["correct"] == "true" for row in rows) / 41)


def test_a_file_that_another_tool_wrote_again_is_refused(tmp_path: Path) -> None:
    """With lists of any length."""
    path = tmp_path / "embeddings.parquet"
    columns = {"path": ["1.jpg"], "target": ["red"], "error": [""], "embedding": [[1.0, 2.0]]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    path.with_suffix(".json").write_text(json.dumps({"network": {}, "top1": None}))
    with pytest.raises(UserError, match=r"embedding is list<.*double>, not a list of fixed size\); "):
        read_embeddings(path, "TRAIN")


@pytest.mark.slow  # of imports
def test_pandas_and_datasets_read_the_parquet_file(data: Path, checkpoint: Path, tmp_path: Path) -> None:
    import datasets

    words = (checkpoint, data / "val", "--output-type", "embedding", "--batch-size", 8, "--output-dir", tmp_path)
    run_here(*words)
    run_here(*words[:-1], tmp_path / "parquet", "--format", "parquet")
    array, file = np.load(tmp_path / "embeddings.npy"), tmp_path / "parquet" / "embeddings.parquet"
    assert np.array_equal(np.stack(pyarrow.parquet.read_table(file).to_pandas()["embedding"]), array)
    rows = datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache")).with_format("numpy")
    assert rows.features["embedding"].length == array.shape[1]
    assert np.array_equal(rows["embedding"][:], array)


def test_mirror_images_and_several_labels(data: Path, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "run" / "best.pt", task="multilabel", loss="bce", best_by="map")
    words = (path, data / "val", "--batch-size", 8, "--output-type", "embedding", "--output-dir")
    run_here(*words, tmp_path / "out")
    run_here(*words, tmp_path / "flipped", "--eval-flip")
    plain, flipped = (np.load(tmp_path / name / "embeddings.npy") for name in ("out", "flipped"))
    assert plain.shape == flipped.shape
    assert np.abs(plain - flipped).max() > 1e-4
    heading = (tmp_path / "out" / "embeddings.csv").read_text().partition("\n")[0]
    assert heading == "path,labels,prob_blue,prob_green,prob_red,error"


def test_a_network_without_a_vector_is_refused() -> None:
    model = timm.create_model("test_resnet", num_classes=3, global_pool="")
    with pytest.raises(UserError, match="--output-type embedding: test_resnet gives no vector before its head"):
        embedding_width(model, resolved(arch="test_resnet", image_size=32))


@pytest.mark.slow
@pytest.mark.dist
def test_several_processes_write_the_same_bytes(data: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "red").mkdir()
    damage.write_kinds(tmp_path / "red")
    words = (checkpoint, tmp_path / "red", data / "val", "--batch-size", 6, "--output-type", "embedding")
    for processes in (1, 2, 3):
        for form in ("npy", "parquet"):
            out = ("--format", form, "--output-dir", tmp_path / f"{form}{processes}")
            done = launch(*words, *out, program=ROOT / "scripts" / "predict.py", processes=processes)
            assert done.status == 0, done.err
    for form, name in (("npy", "embeddings.npy"), ("npy", "embeddings.csv"), ("parquet", "embeddings.parquet")):
        one, *others = ((tmp_path / f"{form}{processes}" / name).read_bytes() for processes in (1, 2, 3))
        assert others == [one, one], name


@pytest.mark.gpu
@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_a_gpu_has_the_features_of_the_cpu(data: Path, tmp_path: Path, amp: str) -> None:
    path = write_checkpoint(tmp_path / "run" / "best.pt", amp=amp)
    words = (path, data / "val", "--batch-size", 8, "--output-type", "embedding", "--output-dir")
    run_here(*words, tmp_path / "cpu", "--device", "cpu")
    run_here(*words, tmp_path / "cuda", "--device", "cuda")
    expected, found = (np.load(tmp_path / name / "embeddings.npy") for name in ("cpu", "cuda"))
    assert found.dtype == np.float32
    similarities = (expected * found).sum(1) / np.linalg.norm(expected, axis=1) / np.linalg.norm(found, axis=1)
    assert similarities.min() > (0.999 if amp == "bf16" else 0.99999)
