"""The examples run as users start them, with the real libraries; a missing package is a failure."""

import importlib.util
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.harness import ROOT, launch

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def require(package: str) -> None:
    assert importlib.util.find_spec(package), f"{package} is missing: pip install -r requirements-examples.txt"


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow  # a kernel that imports torch and DALI, six epochs: half a minute
def test_the_notebook_runs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # python3 is the kernel of ipykernel beside this interpreter
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()
    texts = [
        out.get("text", out.get("data", {}).get("text/plain"))
        for cell in notebook.cells
        for out in cell.get("outputs", ())
    ]
    printed = "\n".join(map(str, texts))
    assert float(re.findall(r"top-1 ([\d.]+) %", printed)[-1]) > 90
    assert texts[-1] == "True", "the resumed feed has the same batch"


# Trains two epochs, or stops in mid-epoch and resumes; prints what each step of training saw.
LIGHTNING = """
import hashlib, json, sys
sys.path.insert(0, "examples")
import lightning
from lightning_feed import Classifier, Images

class Recorded(Classifier):
    seen = []
    def training_step(self, batch, batch_idx):
        images, targets = batch
        content = images.contiguous().numpy().tobytes() + targets.numpy().tobytes()
        self.seen.append((self.current_epoch, batch_idx, hashlib.sha256(content).hexdigest()))
        return super().training_step(batch, batch_idx)

def fit(stop_at=-1, checkpoint=None):
    Recorded.seen = []
    lightning.seed_everything(0)
    save = lightning.pytorch.callbacks.ModelCheckpoint(sys.argv[2], f"{stop_at}", every_n_train_steps=max(0, stop_at))
    trainer = lightning.Trainer(
        max_epochs=2, max_steps=stop_at, accelerator="cpu", logger=False, callbacks=[save],
        default_root_dir=sys.argv[2], enable_progress_bar=False, enable_model_summary=False,
    )
    model = Recorded(3)
    trainer.fit(model, Images(sys.argv[1], batch_size=8, image_size=32, workers=1), ckpt_path=checkpoint)
    return Recorded.seen

whole = fit()
runs = []
for stop_at in (3, 7):
    path = f"{sys.argv[2]}/{stop_at}.ckpt"

    runs.append([fit(stop_at), fit(-1, path)])
with open(f"{sys.argv[2]}/seen.json", "w") as file:
    json.dump([whole, runs], file)
"""


@pytest.mark.slow  # needs Lightning, whose packages take some 100 MB: requirements-examples.txt
def test_lightning_resumes_in_mid_epoch_with_equal_batches(data: Path, tmp_path: Path) -> None:
    require("lightning")
    done = launch(data, tmp_path, program=LIGHTNING, cwd=ROOT)
    assert done.status == 0, done.err
    assert "not resumable" not in done.err
    whole, runs = json.loads((tmp_path / "seen.json").read_text())
    assert len({batch for _, _, batch in whole}) == len(whole) == 10
    for (before, after), stop_at in zip(runs, (3, 7), strict=True):
        assert len(before) == stop_at
        assert [batch for _, _, batch in before + after] == [batch for _, _, batch in whole]


JAX = """
import json, sys
sys.path.insert(0, "examples")
import jax, numpy, torch
import jax_feed
from pipelines import Feed

options = {"batch_size": 8, "image_size": 32, "workers": 1}
with Feed(sys.argv[1], device="cpu", **options) as feed:
    for batch in feed:
        images, targets = jax_feed.to_jax(*batch)
        assert (images.shape, images.dtype, targets.dtype) == ((8, 32, 32, 3), "uint8", "int32")
        assert numpy.array_equal(images, batch.images.permute(0, 2, 3, 1).numpy())
        assert numpy.array_equal(targets, batch.targets.numpy())
print(json.dumps(jax_feed.main(sys.argv[1], 6, **options)))
"""


@pytest.mark.slow  # needs JAX, whose packages take some 300 MB: requirements-examples.txt
def test_jax_trains(data: Path) -> None:
    require("jax")
    done = launch(data, program=JAX, cwd=ROOT)
    assert done.status == 0, done.err
    losses = json.loads(done.out.splitlines()[-1])
    assert losses[-1] < losses[0], "three colors are learned"
