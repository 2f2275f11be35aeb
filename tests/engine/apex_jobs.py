"""A stand-in for NVIDIA apex, and what the processes of the pool run with it."""

import sys
import textwrap
from pathlib import Path
from unittest import mock

from megadiff.config.schema import Config
from megadiff.engine import build
from megadiff.engine.checkpointing import load_checkpoint, save_checkpoint
from tests.engine.layout_jobs import FINGERPRINT, NEXT_STEPS, SAVED_STEPS
from tests.parity.jobs import ready_engine, train_one_step

# States and counters as NVIDIA's keeps them: no step in the state, and none in a group before the first step.
_OPTIMIZER = """
    import torch

    class FusedAdam(torch.optim.Optimizer):
        def __init__(self, params, lr, betas, eps, adam_w_mode):
            assert adam_w_mode is True
            super().__init__(params, dict(lr=lr, bias_correction=True, betas=betas, eps=eps, weight_decay=0.0))

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                group["step"] = group["step"] + 1 if "step" in group else 1
                for param in group["params"]:
                    state = self.state[param]
                    if len(state) == 0:
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                    self._step(param, group, **{key: state[key] for key in ("exp_avg", "exp_avg_sq")})

        def _step(self, param, group, exp_avg, exp_avg_sq):
            first, second = group["betas"]
            exp_avg.lerp_(param.grad, 1 - first)
            exp_avg_sq.mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
            root = (exp_avg_sq / (1 - second ** group["step"])).sqrt() + group["eps"]
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.addcdiv_(exp_avg, root, value=-group["lr"] / (1 - first ** group["step"]))
"""
_NORM = """
    import torch.nn.functional as F

    calls = []

    def fused_rms_norm_affine(input, weight, normalized_shape, eps):
        calls.append(tuple(input.shape))
        return F.rms_norm(input, normalized_shape, weight, eps)
"""
_FILES = {
    "__init__.py": "",
    "optimizers.py": _OPTIMIZER,
    "normalization/__init__.py": "",
    "normalization/fused_layer_norm.py": _NORM,
}


def write_stand_in(packages: Path) -> Path:
    """Writes a package `apex` into a folder for `sys.path`; returns the package."""
    for name, text in _FILES.items():
        path = packages / "apex" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return packages / "apex"


def forget_apex() -> None:
    """Makes the next import of apex look for it again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


def go_on_with_apex(config: Config, packages: Path, folder: Path | None, root: Path | None) -> list[float]:
    """The losses after the first steps, with the stand-in, whose Adam runs on CPU too.

    Args:
        config: with optimizer.name = apex_fused_adam.
        packages: where the stand-in lies.
        folder: a checkpoint that the first steps come from, None to take them.
        root: where to save after them, if anywhere.
    """
    forget_apex()
    try:
        with mock.patch.object(sys, "path", [str(packages), *sys.path]), mock.patch.object(build, "check_device"):
            engine = ready_engine(config)
    finally:
        forget_apex()
    if folder is not None:
        load_checkpoint(engine, folder, FINGERPRINT)
    for step in range(engine.steps, SAVED_STEPS):
        train_one_step(engine, step)
    if root is not None:
        save_checkpoint(engine, root, FINGERPRINT)
    return [float(train_one_step(engine, SAVED_STEPS + step).loss) for step in range(NEXT_STEPS)]
