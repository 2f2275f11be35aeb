"""The folder of a run: resolved settings, logs of steps and figures, pictures, TensorBoard, checkpoints."""

import json
from dataclasses import dataclass
from pathlib import Path

from megadiff.checkpoint.folders import CHECKPOINTS
from megadiff.config.load import to_yaml
from megadiff.config.schema import Config
from megadiff.evaluation.cache import FOLDER


@dataclass(frozen=True)
class RunFolder:
    """Where the parts of a run lie."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def quality(self) -> Path:
        return self.path / "quality.jsonl"

    @property
    def features(self) -> Path:
        """Features of real pictures, where `megadiff evaluate` looks for them too."""
        return self.path / FOLDER

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def prepare(self, config: Config, class_names: tuple[str, ...], steps_done: int) -> None:
        """Writes settings and class names, and cuts the logs back to the steps that a resumed run has; on one rank."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        names = json.dumps(list(class_names), ensure_ascii=False)
        (self.path / "classes.json").write_text(names + "\n", encoding="utf-8")
        for file in (self.log, self.quality):
            if file.exists():
                lines = file.read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if _step_of(line) <= steps_done]
                file.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def _step_of(line: str) -> float:
    """The step of a log line; a line cut short by a crash counts as not yet reached."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
