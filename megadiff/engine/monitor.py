"""What is shown of a run: progress, one log line a step, TensorBoard. Values leave the device at log steps only."""

import json
import sys
import time
from pathlib import Path
from typing import TextIO

import psutil
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from megadiff.config.schema import Config
from megadiff.dist.devices import device_name, model_flops_utilisation, peak_flops
from megadiff.engine.engine import StepResult
from megadiff.engine.quality import QualityReport
from megadiff.engine.run_folder import RunFolder
from megadiff.models.flops import training_flops
from megadiff.sampling.images import grid, save_png

# Losses by noise level are shown in this many equal ranges of timesteps.
NUM_TENTHS = 10


class Monitor:
    """Shows a run; only rank 0 has one that writes, the others have `SilentMonitor`."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        first_step: int,
        last_step: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.config, self.folder, self.world_size, self.device = config, folder, world_size, device
        self.last_step = last_step
        self.flops_per_sample = training_flops(config.model)
        self.peak = peak_flops(device_name(device), config.train.precision)
        self.pending: list[tuple[int, StepResult]] = []
        self.busy_seconds = 0.0
        self.started = 0.0
        self.log: TextIO = folder.log.open("a", encoding="utf-8")
        self.board = _open_board(folder.tensorboard, first_step) if config.monitor.tensorboard else None
        self.bar = tqdm(total=last_step, initial=first_step, unit="step") if sys.stderr.isatty() else None

    def begin_step(self) -> None:
        """Called before the data of a step is fetched."""
        self.started = time.perf_counter()

    def end_step(self, step: int, result: StepResult) -> None:
        """Called after a step; `step` counts from 1."""
        self.pending.append((step, result))
        if step % self.config.monitor.log_every_steps == 0 or step == self.last_step:
            last = float(result.loss)  # waits for the device, so that the time below is the work's
            self.busy_seconds += time.perf_counter() - self.started
            self._flush(last)
        else:
            self.busy_seconds += time.perf_counter() - self.started

    def flush(self) -> None:
        """Writes the steps that wait for a log step, so that the log holds every step of a checkpoint that follows."""
        if self.pending:
            self._flush(float(self.pending[-1][1].loss))

    def _flush(self, last_loss: float) -> None:
        rate = len(self.pending) * self.config.train.global_batch_size / max(self.busy_seconds, 1e-9)
        utilisation = model_flops_utilisation(rate, self.flops_per_sample, self.world_size, self.peak)
        common = {"samples_per_s": rate, "mfu": utilisation, "memory_bytes": memory_bytes(self.device)}
        self._write_levels()
        for step, result in self.pending:
            values = {"loss": float(result.loss), "grad_norm": float(result.grad_norm), "lr": result.lr}
            self._write(step, values | common | {"applied": result.applied})
        step, result = self.pending[-1]
        self._show(step, last_loss, result, rate, utilisation)
        self.pending, self.busy_seconds = [], 0.0

    def _write(self, step: int, values: dict[str, float | bool | None]) -> None:
        self.log.write(json.dumps({"step": step, **values}) + "\n")
        self.log.flush()
        if self.board is None:
            return
        for key, tag in _BOARD_TAGS.items():
            value = values[key]
            if value is not None:
                self.board.add_scalar(tag, value, step)

    def _write_levels(self) -> None:
        """Mean loss of the waiting steps' samples per tenth of the timesteps, from the cleanest (0) to the noisiest."""
        if self.board is None:
            return
        tenths = torch.cat([result.seen.t for _, result in self.pending]).cpu()
        tenths = tenths * NUM_TENTHS // self.config.diffusion.num_train_timesteps
        losses = torch.cat([result.seen.loss for _, result in self.pending]).cpu()
        counts = torch.bincount(tenths, minlength=NUM_TENTHS)
        sums = torch.zeros(NUM_TENTHS, dtype=losses.dtype).index_add_(0, tenths, losses)
        for tenth in counts.nonzero().flatten().tolist():
            self.board.add_scalar(f"LossByNoise/{tenth}", float(sums[tenth] / counts[tenth]), self.pending[-1][0])

    def _show(self, step: int, loss: float, result: StepResult, rate: float, utilisation: float | None) -> None:
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{loss:.4f}", lr=f"{result.lr:.2e}", images_per_s=f"{rate:.1f}")
            self.bar.update(step - self.bar.n)
            return
        left = (self.last_step - step) * self.config.train.global_batch_size / rate
        mfu = "n/a" if utilisation is None else f"{utilisation:.1%}"
        print(
            f"step {step}/{self.last_step}  loss {loss:.4f}  grad_norm {float(result.grad_norm):.3f}  "
            f"lr {result.lr:.2e}  {rate:.1f} images/s  mfu {mfu}  left {_duration(left)}",
            flush=True,
        )

    def show_samples(self, step: int, images: Tensor, per_row: int) -> Path | None:
        """Writes the picture grid of a step (a row a condition); latents have no picture."""
        if images.shape[1] not in (1, 3):
            return None
        picture = grid(images, columns=per_row)
        path = self.folder.samples / f"step_{step:08d}.png"
        save_png(picture, path)
        if self.board is not None:
            self.board.add_image("Generated", picture, step)
        return path

    def show_quality(self, step: int, report: QualityReport) -> None:
        """Writes the figures of a step: a line in `quality.jsonl`, one that is printed, and TensorBoard."""
        figures = {name: getattr(report.quality, name) for name in _FIGURES}
        line = {"step": step, **figures, "num_images": report.num_images, "size": report.size}
        line |= {"features": report.features, "fingerprint": report.fingerprint}
        with self.folder.quality.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self.tell(f"quality at step {step}: {shown}  ({report.num_images} pictures, {report.features})")
        if self.board is not None:
            for name, value in figures.items():
                self.board.add_scalar(f"Quality/{name}", value, step)

    def tell(self, line: str) -> None:
        """Prints a line without breaking the progress bar."""
        tqdm.write(line)

    def close(self) -> None:
        """Ends the bar and the files."""
        self.log.close()
        if self.board is not None:
            self.board.close()
        if self.bar is not None:
            self.bar.close()


class SilentMonitor(Monitor):
    """The monitor of the ranks that show nothing."""

    def __init__(self) -> None:
        pass

    def begin_step(self) -> None:
        pass

    def end_step(self, step: int, result: StepResult) -> None:
        pass

    def flush(self) -> None:
        pass

    def show_samples(self, step: int, images: Tensor, per_row: int) -> Path | None:
        return None

    def show_quality(self, step: int, report: QualityReport) -> None:
        pass

    def tell(self, line: str) -> None:
        pass

    def close(self) -> None:
        pass


_FIGURES = ("frechet", "kernel", "precision", "recall", "density", "coverage")
_BOARD_TAGS = {
    "loss": "Loss/train",
    "grad_norm": "GradNorm/global",
    "lr": "LearningRate",
    "samples_per_s": "Throughput/samples_per_s",
    "mfu": "Throughput/mfu",
    "memory_bytes": "Memory/bytes",
}


def _open_board(folder: Path, first_step: int) -> SummaryWriter:
    return SummaryWriter(str(folder), purge_step=first_step + 1)


def memory_bytes(device: torch.device) -> int:
    """The most memory that was in use: of the CUDA device, or now of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
