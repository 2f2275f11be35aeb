"""The small trained networks that rows of `benchmarks/sampling.py` sample from, kept in build/sampling."""

import atexit
import contextlib
import functools
import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megadiff.checkpoint.folders import find_checkpoint, has_checkpoint
from megadiff.checkpoint.reader import CheckpointReader
from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.dist import process
from megadiff.engine.trainer import train
from megadiff.models.build import build_network
from megadiff.models.chain import Chain
from megadiff.sampling.generate import ImageRequest, generate
from megadiff.sampling.guidance import Predict

CACHE = Path(__file__).resolve().parents[2] / "build" / "sampling"
# Groups of pictures that look alike, so that minutes of training suffice to tell them apart.
_CLASSES = (
    "face=face-smiling|face-affection|face-neutral-skeptical|face-concerned",
    "animal face=animal-mammal:face+cat-face",
    "heart=heart:heart",
    "clock=time:clock face",
    "moon=sky & weather:moon",
    "square=geometric:square",
)
_TRAINING: Mapping[str, Any] = MappingProxyType(
    {
        "model.num_classes": len(_CLASSES),
        "diffusion.schedule": "flow",
        "diffusion.prediction": "flow",
        "diffusion.timestep_sampling": "logit_normal",
        "diffusion.condition_dropout": 0.1,
        "data.name": "emoji",
        "data.classes": _CLASSES,
        "data.balanced": True,
        "train.global_batch_size": 32,
        "optimizer.lr": 2e-3,
        "optimizer.betas": (0.9, 0.99),
        "ema.decay": 0.98,
        "sampling.clip_x0": True,
        "monitor.sample_every_steps": 0,
        "monitor.tensorboard": False,
    }
)
_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dit": {"model.preset": "dit-small-cpu"},
        "unet": {
            "model.name": "unet",
            "model.input_size": 16,
            "model.in_channels": 3,
            "model.block_out_channels": (32, 48, 192),
            "model.transformer_layers_per_block": (0, 0, 1),
            "model.layers_per_block": 1,
            "model.norm_num_groups": 16,
        },
    }
)
# Until errors are those of steps: after fewer, answers at neighbouring timesteps differ by more than those.
_STEPS: Mapping[str, int] = MappingProxyType({"dit": 600, "unet": 1500})
_QUICK_STEPS = 8


def trained(name: str, quick: bool) -> tuple[Config, Chain]:
    """A conditional network of emoji at 16 pixels, trained at its first use, with the averaged weights on the CPU.

    What was trained stays in build/sampling under a hash of its settings; `make clean` removes it.

    Args:
        name: dit (6 blocks) or unet (3 levels).
        quick: only a few steps, which are enough to see that a row runs.
    """
    config = _config(name, _QUICK_STEPS if quick else _STEPS[name])
    return config, _load(config, find_checkpoint(run_folder(name, quick)))


def run_folder(name: str, quick: bool) -> Path:
    """The run folder of a trained network, see `trained`; made at its first use."""
    config = _config(name, _QUICK_STEPS if quick else _STEPS[name])
    folder = CACHE / f"{name}-{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]}"
    if not has_checkpoint(folder):
        _train(config, folder)
    return folder


def predict_of(chain: Chain) -> Predict:
    """The chain as samplers call a network, without gradients."""

    @torch.no_grad()
    def predict(x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        answer: Tensor = chain((x_t, t, labels))
        return answer

    return predict


def sample(config: Config, open_predict: Callable[[], Predict], count: int, **sampling: Any) -> Tensor:
    """(N, C, H, W) pictures of the classes in turn, always of the same seed.

    Args:
        config: of the network.
        open_predict: see `megadiff.sampling.generate.generate`.
        count: N.
        sampling: settings of `sampling` that differ from the config's.
    """
    config = config.model_copy(update={"sampling": config.sampling.model_copy(update=sampling)})
    conditions = [index % config.model.num_classes for index in range(count)]
    request = ImageRequest(conditions, range(count), seed=0, batch_size=count)
    return generate(request, config, open_predict, torch.device("cpu"), 0, 1, lambda part: part)


def psnr(found: Tensor, expected: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each picture in dB, (N,); pixels are cut to [-1, 1] and span 2."""
    return 10 * torch.log10(4 / (found.clamp(-1, 1) - expected.clamp(-1, 1)).square().mean((1, 2, 3)))


@functools.cache
def reference(name: str, quick: bool, count: int) -> Tensor:
    """What `sample` makes with many steps: 250 of a second-order solver end nearer to the flow than 1000 of DDIM."""
    config, chain = trained(name, quick)
    return sample(config, lambda: predict_of(chain), count, solver="dpmpp_2m", steps=16 if quick else 250)


def rms(found: Tensor, expected: Tensor) -> float:
    """Root mean square difference of pixels, which span 2, of a typical picture: the geometric mean over pictures.

    Of few pictures the plain mean is that of the one or two that a small difference leads elsewhere.
    """
    return float((found - expected).square().mean((1, 2, 3)).log().mean().div(2).exp())


def relative_error(found: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference by that of what is expected."""
    return float((found - expected).norm() / expected.norm())


def _config(name: str, steps: int) -> Config:
    settings = {
        **_TRAINING,
        **_MODELS[name],
        "train.steps": steps,
        "optimizer.warmup_steps": max(1, steps // 10),
        "checkpoint.save_every_steps": steps,
    }
    return load_config(None, settings)


def _train(config: Config, folder: Path) -> None:
    """Into a folder that gets its name when the run has ended."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / "output.txt").open("w", encoding="utf-8") as output, contextlib.redirect_stdout(output):
        train(config, partial, None, _process())
    partial.rename(folder)


@functools.cache
def _process() -> process.Process:
    atexit.register(process.stop)
    return process.start(timeout_seconds=600)


@torch.no_grad()
def _load(config: Config, checkpoint: Path) -> Chain:
    chain = build_network(config.model, seed=0).eval()
    with CheckpointReader(checkpoint) as reader:
        reader.verify()
        for name, parameter in chain.named_parameters():
            parameter.copy_(reader.read("ema", name))
    return chain
