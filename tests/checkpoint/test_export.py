"""Exports: the right weights under the right names, computing the same, or a refusal."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from diffusers import DiTTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from megadiff.checkpoint import CheckpointReader, find_checkpoint
from megadiff.checkpoint.conventions import CONVENTIONS, ConventionName
from megadiff.checkpoint.export import ExportSettings, Weights, export_weights, plan_shards
from megadiff.checkpoint.names import parameter_shapes
from megadiff.errors import CheckpointError
from tests.checkpoint.networks import dit_output, inputs, our_output, random_run, random_weights, tiny_config
from tests.checkpoint.saving import save_run

NAMES: list[ConventionName] = ["native", "diffusers", "facebookresearch"]


def load_folder(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("learn_sigma", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_diffusers_loads_the_export_and_computes_the_same(
    tmp_path: Path, learn_sigma: bool, max_shard_bytes: int
) -> None:
    config = tiny_config(time_freq_shift=1, learn_sigma=learn_sigma)
    run = random_run(tmp_path / "run", config)
    settings = ExportSettings("diffusers", max_shard_bytes=max_shard_bytes)
    export_weights(run, tmp_path / "out", settings)
    theirs, report = DiTTransformer2DModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    x, t, labels = inputs(config)
    with torch.no_grad():
        output = theirs.eval()(x, timestep=t, class_labels=labels).sample
    ours = our_output(config, random_weights(config, 2))
    assert ours.std() > 0.01, "an output near zero would agree with anything"
    torch.testing.assert_close(output, ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize("learn_sigma", [False, True])
def test_facebookresearch_names_compute_the_same(tmp_path: Path, learn_sigma: bool) -> None:
    config = tiny_config(learn_sigma=learn_sigma, mlp_ratio=2.0)
    export_weights(random_run(tmp_path / "run", config), tmp_path / "out", ExportSettings("facebookresearch"))
    output = dit_output(load_folder(tmp_path / "out"), config.model.num_heads, *inputs(config))
    torch.testing.assert_close(output, our_output(config, random_weights(config, 2)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_b25_raw_and_ema_differ_by_exactly_the_weights(tmp_path: Path, name: ConventionName) -> None:
    """B25: raw weights are all 1 and EMA all 2; both are exported, and the header says which."""
    config = tiny_config(time_freq_shift=1 if name == "diffusers" else 0)
    shapes = parameter_shapes(config.model)
    kinds = {"model": {n: torch.ones(s) for n, s in shapes.items()}}
    kinds["ema"] = {n: torch.full(s, 2.0) for n, s in shapes.items()}
    run = save_run(tmp_path / "run", 100, kinds, config)
    weights: list[tuple[Weights, float]] = [("raw", 1.0), ("ema", 2.0)]
    for choice, value in weights:
        out = tmp_path / choice
        export_weights(run, out, ExportSettings(name, weights=choice))
        tensors = load_folder(out)
        positions = tensors.pop("pos_embed", None)
        assert (positions is not None) == (name == "facebookresearch")
        assert tensors and all(bool((tensor == value).all()) for tensor in tensors.values())
        with safe_open(next(out.glob("*.safetensors")), framework="pt") as file:
            metadata = file.metadata()
        assert metadata["weights"] == choice and metadata["step"] == "100" and metadata["format"] == "pt"


def test_b25_ema_from_a_checkpoint_without_it_is_an_error(tmp_path: Path) -> None:
    config = tiny_config()
    run = save_run(tmp_path / "run", 100, {"model": random_weights(config, 1)}, config)
    with pytest.raises(CheckpointError, match="no ema weights; use --weights raw"):
        export_weights(run, tmp_path / "out", ExportSettings("native"))
    assert not (tmp_path / "out").exists()
    export_weights(run, tmp_path / "out", ExportSettings("native", weights="raw"))


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("diffusers", {}, r"time_freq_shift = 0.*use native or facebookresearch"),
        ("diffusers", {"time_freq_shift": 1, "qk_norm": True}, r"qk_norm.*use native$"),
        ("diffusers", {"time_freq_shift": 1, "mlp_ratio": 2.0}, r"mlp_ratio = 2\.0"),
        ("facebookresearch", {"time_freq_shift": 1}, r"time_freq_shift = 1.*use native or diffusers"),
        ("facebookresearch", {"qk_norm": True}, r"qk_norm"),
    ],
)
def test_an_export_that_would_change_the_result_is_refused(
    tmp_path: Path, name: ConventionName, model: dict[str, object], message: str
) -> None:
    run = random_run(tmp_path / "run", tiny_config(**model))
    with pytest.raises(CheckpointError, match=message):
        export_weights(run, tmp_path / "out", ExportSettings(name))
    assert not (tmp_path / "out").exists()


def test_native_holds_every_network(tmp_path: Path) -> None:
    config = tiny_config(qk_norm=True, time_freq_shift=1, mlp_ratio=2.0)
    export_weights(random_run(tmp_path / "run", config), tmp_path / "out", ExportSettings("native"))
    weights, expected = load_folder(tmp_path / "out"), random_weights(config, 2)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_is_that_of_every_tensor(tmp_path: Path, dtype: str) -> None:
    config = tiny_config()
    settings = ExportSettings("facebookresearch", dtype=dtype)  # type: ignore[arg-type]
    export_weights(random_run(tmp_path / "run", config), tmp_path / "out", settings)
    tensors = load_folder(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    expected = random_weights(config, 2)["embed.label.weight"].to(getattr(torch, dtype))
    assert torch.equal(tensors["y_embedder.embedding_table.weight"], expected)


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config, 1)
    weights["head.out.bias"][0] = 1e6
    run = save_run(tmp_path / "run", 1, {"model": weights}, config)
    with pytest.raises(CheckpointError, match=r"head\.out\.bias"):
        export_weights(run, tmp_path / "out", ExportSettings("native", weights="raw", dtype="float16"))
    assert list(tmp_path.iterdir()) == [run]


def test_shards_have_an_index_and_keep_the_limit(tmp_path: Path) -> None:
    config = tiny_config(time_freq_shift=1)
    run = random_run(tmp_path / "run", config)
    limit = 40_000
    export_weights(run, tmp_path / "out", ExportSettings("diffusers", max_shard_bytes=limit))
    export_weights(run, tmp_path / "one", ExportSettings("diffusers"))
    index = json.loads((tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors"
    total = 0
    for name in files:
        tensors = load_file(tmp_path / "out" / name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= limit
        assert all(index["weight_map"][key] == name for key in tensors)
        total += size
    assert index["metadata"]["total_size"] == total
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors")] == ["diffusion_pytorch_model.safetensors"]
    one, many = load_folder(tmp_path / "one"), load_folder(tmp_path / "out")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_shard_plan() -> None:
    assert plan_shards([4, 4, 4, 9, 1, 1], 8) == [[0, 1], [2], [3], [4, 5]]
    assert plan_shards([1, 1], 8) == [[0, 1]]


def test_an_export_holds_about_one_shard_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the bytes of tensors read from the checkpoint that are alive at any time."""
    config = tiny_config(num_layers=12)
    run = random_run(tmp_path / "run", config)
    alive, peak = 0, 0
    read = CheckpointReader.read

    def counting(self: CheckpointReader, kind: str, name: str) -> Tensor:
        nonlocal alive, peak
        tensor = read(self, kind, name)
        size = tensor.nbytes

        def gone() -> None:
            nonlocal alive
            alive -= size

        weakref.finalize(tensor, gone)
        alive += size
        peak = max(peak, alive)
        return tensor

    monkeypatch.setattr(CheckpointReader, "read", counting)
    limit = 50_000
    gc.collect()
    export_weights(run, tmp_path / "out", ExportSettings("native", max_shard_bytes=limit))
    total = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    largest = max(tensor.nbytes for tensor in random_weights(config, 1).values())
    assert total > 6 * limit
    assert limit // 2 < peak <= limit + largest


def test_an_existing_target_is_left_alone(tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", tiny_config())
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("precious")
    with pytest.raises(CheckpointError, match="exists already"):
        export_weights(run, out, ExportSettings("native"))
    assert (out / "model.safetensors").read_text() == "precious"


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", tiny_config())
    file = find_checkpoint(run) / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="rank_00001"):
        export_weights(run, tmp_path / "out", ExportSettings("native"))
    assert list(tmp_path.iterdir()) == [run]


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(tiny_config(hidden_size=32), 1)
    run = save_run(tmp_path / "run", 1, {"model": weights}, config)
    with pytest.raises(CheckpointError, match="belongs to another network"):
        export_weights(run, tmp_path / "out", ExportSettings("native", weights="raw"))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_exported(name: ConventionName) -> None:
    config = tiny_config()
    covered = {ours for row in CONVENTIONS[name].rows(config.model) for ours in row.ours}
    assert covered == set(parameter_shapes(config.model))
