"""NVIDIA apex: a clear error where it is absent, and its Adam and norm where it is (here a stand-in)."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from megadiff.config.load import load_config
from megadiff.dist.process import Process
from megadiff.engine.build import check_device
from megadiff.engine.optimizer import make_optimizer, set_learning_rate, state_keys
from megadiff.errors import ConfigError
from megadiff.models import build_network
from megadiff.ops.backends import Backends
from megadiff.ops.rms_norm import require_apex, rms_norm
from tests.engine.apex_jobs import forget_apex, go_on_with_apex, write_stand_in
from tests.engine.layout_jobs import load_and_go_on, odd_config, save_and_go_on
from tests.engine.runs import RUN_SECONDS, checkpoint
from tests.parity.outcome import relative
from tests.pool import WorkerPool

TINY = {"data.name": "ids", "model.preset": "dit-tiny-test", "model.qk_norm": True}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with apex's interface."""
    package = write_stand_in(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_apex()
    yield package
    forget_apex()


def test_the_unrelated_package_of_pypi_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("# a web toolkit of 2013\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_apex()
    config = load_config(None, {**TINY, "optimizer.name": "apex_fused_adam"})
    with pytest.raises(ConfigError, match=r"apex_fused_adam needs NVIDIA apex.*github.com/NVIDIA/apex.*PyPI"):
        make_optimizer(config.optimizer, build_network(config.model, 0))
    forget_apex()


def test_a_build_without_cuda_extensions_is_one_sentence(stand_in: Path) -> None:
    (stand_in / "optimizers.py").write_text(
        "class FusedAdam:\n    def __init__(self, *_, **__):\n        raise RuntimeError('requires cuda extensions')\n"
    )
    config = load_config(None, {**TINY, "optimizer.name": "apex_fused_adam"})
    with pytest.raises(ConfigError, match=r"cannot run it \(requires cuda extensions\); build apex"):
        make_optimizer(config.optimizer, build_network(config.model, 0))


def test_apex_steps_where_it_is_installed(stand_in: Path) -> None:
    config = load_config(None, {**TINY, "optimizer.name": "apex_fused_adam", "optimizer.weight_decay": 0.1})
    networks = [build_network(config.model, 0) for _ in range(2)]
    plain = config.optimizer.model_copy(update={"name": "adamw"})
    for network, settings in zip(networks, (config.optimizer, plain), strict=True):
        optimizer = make_optimizer(settings, network)
        set_learning_rate(optimizer, 0.1)
        for parameter in network.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert all(set(state_keys(settings)) <= state.keys() for state in optimizer.state.values())
    for ours, theirs in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_b22_apex_and_adamw_continue_each_other(pools: Mapping[int, WorkerPool], tmp_path: Path) -> None:
    """apex keeps its step counter in the group and not in the state; lost, the first steps would be far too long."""
    write_stand_in(tmp_path)
    apex, adamw = (odd_config("fp32", name, zero_stage=1) for name in ("apex_fused_adam", "adamw"))
    whole = odd_config("fp32", tensor=2)
    saved = pools[2].run(save_and_go_on, RUN_SECONDS, config=adamw, root=tmp_path / "adamw/checkpoints")
    expected = saved[0].losses
    with_apex = {"config": apex, "packages": tmp_path}
    root = tmp_path / "apex/checkpoints"
    straight = pools[2].run(go_on_with_apex, RUN_SECONDS, **with_apex, folder=None, root=root)
    from_adamw = checkpoint(tmp_path / "adamw", 3)
    resumed = pools[2].run(go_on_with_apex, RUN_SECONDS, **with_apex, folder=from_adamw, root=None)
    others = pools[2].run(load_and_go_on, RUN_SECONDS, config=whole, folder=checkpoint(tmp_path / "apex", 3))
    for losses in (straight[0], resumed[0], others[0].losses):
        assert relative(losses, expected) < 1e-5


def test_apex_needs_cuda_and_the_extension_of_its_norms(stand_in: Path) -> None:
    """The real package would fail in the first step only."""
    config = load_config(None, {**TINY, "optimizer.name": "apex_fused_adam"})
    with pytest.raises(ConfigError, match="apex_fused_adam runs on CUDA only, but this process computes on cpu"):
        check_device(config, Process(0, 1, 0, torch.device("cpu")))
    config = load_config(None, {**TINY, "train.norm_backend": "apex"})
    with pytest.raises(ConfigError, match="norm_backend = apex needs NVIDIA apex, whose fused_layer_norm_cuda"):
        check_device(config, Process(0, 1, 0, torch.device("cuda")))


def test_apex_norms_where_it_is_installed(stand_in: Path) -> None:
    from apex.normalization.fused_layer_norm import calls

    model = load_config(None, TINY).model
    x = torch.randn(2, model.in_channels, model.input_size, model.input_size)
    inputs = (x, torch.tensor([1, 2]), torch.tensor([0, 1]))
    answers = [build_network(model, 0, backends=Backends(norm=norm))(inputs) for norm in ("torch", "apex")]
    assert len(calls) == 2 * model.num_layers  # queries and keys
    torch.testing.assert_close(*answers)
    half, weight = torch.randn(3, 8).bfloat16(), torch.ones(8)
    assert torch.equal(rms_norm(half, weight, 1e-6, "apex"), rms_norm(half, weight, 1e-6))


def test_norm_without_apex_is_refused() -> None:
    forget_apex()
    with pytest.raises(ConfigError, match=r"train.norm_backend = apex needs NVIDIA apex"):
        require_apex("train.norm_backend = apex", "apex.normalization.fused_layer_norm")


def test_what_apex_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"use zero_stage = 2 or optimizer.name = adamw_ema"):
        load_config(None, {**TINY, "optimizer.name": "apex_fused_adam", "parallel.zero_stage": 3})
    with pytest.raises(ConfigError, match=r"norm_backend = apex has no effect with model.qk_norm = false"):
        load_config(None, {**TINY, "model.qk_norm": False, "train.norm_backend": "apex"})
