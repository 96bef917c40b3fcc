"""Experiment trackers that runs are sent to: trackio, wandb and mlflow, each by its own package.

The packages are imported where they are used: they are optional, and `utils.report.tracking.sender` runs them in a
process of their own. Servers, accounts and local stores are those of the package's environment variables.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

PROJECT = "brisk"  # where neither --track-project nor the tracker's environment variable names one
Outcome = Literal["finished", "stopped", "died"]  # how a launch has ended
ARTIFACT_TYPE = "model"


class Tracker(Protocol):
    """One tracked run. Every method may raise any error of the tracker's package."""

    def open(self, run_id: str | None, name: str, config: Mapping[str, Any]) -> str:
        """Create the run, or continue it where `run_id` is given; returns its id."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send metrics of an optimizer step; the steps of a run never decrease."""

    def finish(self, outcome: Outcome, summary: Mapping[str, Any], checkpoint: Path | None) -> None:
        """Send the content of summary.json and, if one is given, a file of weights; waits until all is sent."""


class Trackio:
    """Hugging Face's trackio: TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says where the runs are."""

    def __init__(self, project: str | None, folder: Path) -> None:
        import trackio

        self._trackio = trackio
        self._project = project or PROJECT

    def open(self, run_id: str | None, name: str, config: Mapping[str, Any]) -> str:
        # A run is found by its name, so the first launch makes one that no other output folder has.
        name = run_id or f"{name}-{os.urandom(3).hex()}"
        resume = "allow" if run_id else "never"
        self._trackio.init(
            self._project, name, config=dict(config), resume=resume, auto_log_gpu=False, auto_log_cpu=False
        )
        return name

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def finish(self, outcome: Outcome, summary: Mapping[str, Any], checkpoint: Path | None) -> None:
        if numbers := {f"summary/{name}": value for name, value in _numbers(summary).items()}:
            self._trackio.log(numbers)
        if checkpoint is not None:
            self._trackio.log_artifact(checkpoint, type=ARTIFACT_TYPE)
        self._trackio.finish()


class Wandb:
    """Weights & Biases; WANDB_MODE=offline writes files into the output folder, for `wandb sync`."""

    def __init__(self, project: str | None, folder: Path) -> None:
        import wandb

        self._wandb = wandb
        self._project = project or os.environ.get("WANDB_PROJECT", PROJECT)
        self._folder = folder
        self._run: Any = None

    def open(self, run_id: str | None, name: str, config: Mapping[str, Any]) -> str:
        self._run = self._wandb.init(
            project=self._project, id=run_id, name=name, resume="allow", dir=str(self._folder), config=dict(config),
            settings=self._wandb.Settings(console="off"),
        )  # fmt: skip
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, outcome: Outcome, summary: Mapping[str, Any], checkpoint: Path | None) -> None:
        self._run.summary.update(dict(summary))
        if checkpoint is not None:
            artifact = self._wandb.Artifact(f"{self._run.id}-{checkpoint.stem}", type=ARTIFACT_TYPE)
            artifact.add_file(str(checkpoint))
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=int(outcome == "died"))


class Mlflow:
    """MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where the runs are."""

    def __init__(self, project: str | None, folder: Path) -> None:
        import mlflow

        self._mlflow = mlflow
        self._project = project or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)

    def open(self, run_id: str | None, name: str, config: Mapping[str, Any]) -> str:
        self._mlflow.set_experiment(self._project)
        run = self._mlflow.start_run(run_id=run_id, run_name=None if run_id else name)
        if run_id is None:  # a parameter cannot be changed
            self._mlflow.log_params({name: value for name, value in config.items() if value is not None})
        return str(run.info.run_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self, outcome: Outcome, summary: Mapping[str, Any], checkpoint: Path | None) -> None:
        if summary:
            self._mlflow.log_metrics({f"summary/{name}": value for name, value in _numbers(summary).items()})
        if checkpoint is not None:
            self._mlflow.log_artifact(str(checkpoint))
        self._mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED", "died": "FAILED"}[outcome])


TRACKERS: dict[str, Callable[[str | None, Path], Tracker]] = {"trackio": Trackio, "wandb": Wandb, "mlflow": Mlflow}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
