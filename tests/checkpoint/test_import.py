"""Imports: round trips are exact, foreign weights compute the same here, and anything unclear is refused."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadiff.checkpoint import CheckpointReader, find_checkpoint
from megadiff.checkpoint.conventions import ConventionName
from megadiff.checkpoint.export import ExportSettings, export_weights
from megadiff.checkpoint.import_ import ImportSettings, import_weights
from megadiff.config.load import load_config
from megadiff.errors import CheckpointError
from tests.checkpoint.networks import inputs, our_output, random_run, random_weights, tiny_config

NAMES: list[ConventionName] = ["native", "diffusers", "facebookresearch"]


def shift_of(name: ConventionName) -> int:
    return 1 if name == "diffusers" else 0


def read_all(run: Path, kind: str) -> dict[str, Tensor]:
    with CheckpointReader(find_checkpoint(run)) as reader:
        reader.verify()
        return {name: reader.read(kind, name) for name in reader.names(kind)}


@pytest.mark.parametrize("max_shard_bytes", [10**9, 30_000])
@pytest.mark.parametrize("learn_sigma", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_exact(tmp_path: Path, name: ConventionName, learn_sigma: bool, max_shard_bytes: int) -> None:
    config = tiny_config(time_freq_shift=shift_of(name), learn_sigma=learn_sigma)
    export_weights(
        random_run(tmp_path / "run", config),
        tmp_path / "out",
        ExportSettings(name, max_shard_bytes=max_shard_bytes),
    )
    settings = ImportSettings(name, max_shard_bytes=max_shard_bytes)
    imported = import_weights(tmp_path / "out", tmp_path / "new", settings)
    assert imported.model == config.model and imported.diffusion == config.diffusion
    assert load_config(tmp_path / "new" / "config.yaml") == imported
    folder = find_checkpoint(tmp_path / "new")
    assert folder.name == "step_00000000"
    with CheckpointReader(folder) as reader:
        assert reader.config() == imported and reader.index.step == 0
        assert set(reader.index.counters.values()) == {0}
    expected = random_weights(config, 2)
    for kind in ("model", "ema"):
        values = read_all(tmp_path / "new", kind)
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[key], expected[key]) for key in expected)
    export_weights(tmp_path / "new", tmp_path / "again", ExportSettings(name, max_shard_bytes=max_shard_bytes))
    for path in (tmp_path / "out").glob("*.safetensors"):
        before, after = load_file(path), load_file(tmp_path / "again" / path.name)
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_round_trip_is_exact(tmp_path: Path, name: ConventionName) -> None:
    run = random_run(tmp_path / "run", tiny_config(time_freq_shift=shift_of(name)))
    export_weights(run, tmp_path / "out", ExportSettings(name, dtype="bfloat16"))
    import_weights(tmp_path / "out", tmp_path / "new", ImportSettings(name))
    assert read_all(tmp_path / "new", "ema")["head.out.bias"].dtype == torch.float32
    export_weights(tmp_path / "new", tmp_path / "again", ExportSettings(name, dtype="bfloat16"))
    file = next((tmp_path / "out").glob("*.safetensors")).name
    before, after = load_file(tmp_path / "out" / file), load_file(tmp_path / "again" / file)
    assert all(torch.equal(before[key], after[key]) for key in before)


def diffusers_model(**changes: Any) -> DiTTransformer2DModel:
    torch.manual_seed(0)
    settings = {
        "num_attention_heads": 4,
        "attention_head_dim": 6,
        "in_channels": 3,
        "out_channels": 6,
        "num_layers": 2,
        "sample_size": 8,
        "num_embeds_ada_norm": 5,
        "norm_eps": 1e-6,
    }
    model = DiTTransformer2DModel(**{**settings, **changes})
    first = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks[1:]:
        block.norm1.emb.load_state_dict(first)
    return model.eval()


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_a_diffusers_model_computes_the_same_here(tmp_path: Path, max_shard_size: str) -> None:
    theirs = diffusers_model()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    config = import_weights(tmp_path / "theirs", tmp_path / "run", ImportSettings("diffusers"))
    assert config.model.learn_sigma and config.model.time_freq_shift == 1 and config.model.num_classes == 5
    assert config.diffusion.schedule == "linear" and config.diffusion.prediction == "eps"
    x, t, labels = inputs(config)
    with torch.no_grad():
        expected = theirs(x, timestep=t, class_labels=labels).sample
    torch.testing.assert_close(our_output(config, read_all(tmp_path / "run", "model")), expected, rtol=0, atol=1e-4)


def test_unequal_embedders_of_blocks_are_refused(tmp_path: Path) -> None:
    theirs = diffusers_model()
    with torch.no_grad():
        theirs.transformer_blocks[1].norm1.emb.timestep_embedder.linear_2.bias[0] += 1e-6
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"transformer_blocks\.1\.norm1\.emb\.timestep_embedder\.linear_2\.bias"):
        import_weights(tmp_path / "theirs", tmp_path / "run", ImportSettings("diffusers"))
    assert not (tmp_path / "run").exists()


def test_another_norm_eps_needs_consent(tmp_path: Path) -> None:
    diffusers_model(norm_eps=1e-5).save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"norm_eps = 1e-05.*--accept-norm-eps"):
        import_weights(tmp_path / "theirs", tmp_path / "run", ImportSettings("diffusers"))
    import_weights(tmp_path / "theirs", tmp_path / "run", ImportSettings("diffusers", accept_norm_eps=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "PixArtTransformer2DModel"}, "PixArtTransformer2DModel"),
        ({"activation_fn": "geglu"}, "activation_fn"),
        ({"attention_bias": False}, "attention_bias"),
        ({"out_channels": 7}, "out_channels = 7"),
        ({"num_layers": 4}, "lacks"),
        ({"num_embeds_ada_norm": 9}, r"\(6, 24\) instead of \(10, 24\)"),
        ({"num_attention_heads": "four"}, "no usable network"),
        ({"sample_size": None}, "no usable network"),
        ({"patch_size": 3}, "no usable network"),
    ],
)
def test_a_config_json_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    diffusers_model().save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        import_weights(tmp_path / "theirs", tmp_path / "run", ImportSettings("diffusers"))
    assert not (tmp_path / "run").exists()


def strip_header(folder: Path) -> Path:
    """Weights as others publish them: the same tensors without our header."""
    file = folder / "model.safetensors"
    save_file(load_file(file), file)
    return file


def test_published_weights_without_a_header(tmp_path: Path) -> None:
    config = tiny_config(learn_sigma=True)
    export_weights(random_run(tmp_path / "run", config), tmp_path / "out", ExportSettings("facebookresearch"))
    file = strip_header(tmp_path / "out")
    with pytest.raises(CheckpointError, match="--num-heads"):
        import_weights(file, tmp_path / "new", ImportSettings("facebookresearch"))
    imported = import_weights(file, tmp_path / "new", ImportSettings("facebookresearch", num_heads=4))
    assert imported.model == config.model
    assert imported.diffusion.schedule == "linear" and imported.diffusion.prediction == "eps"


def test_the_config_of_the_new_run_may_be_given(tmp_path: Path) -> None:
    config = tiny_config(dropout=0.1)
    for name in ("native", "facebookresearch"):
        export_weights(random_run(tmp_path / f"{name}-run", config), tmp_path / name, ExportSettings(name))
        strip_header(tmp_path / name)
        settings = ImportSettings(name, config=config)
        assert import_weights(tmp_path / name, tmp_path / f"{name}-new", settings) == config
        with pytest.raises(CheckpointError, match=r"hidden_size = 48|another network"):
            other = ImportSettings(name, config=tiny_config(hidden_size=48))
            import_weights(tmp_path / name, tmp_path / "wrong", other)
    with pytest.raises(CheckpointError, match=r"time_freq_shift = 1 in the config"):
        settings = ImportSettings("facebookresearch", config=tiny_config(time_freq_shift=1))
        import_weights(tmp_path / "facebookresearch", tmp_path / "wrong", settings)


def test_native_weights_without_header_or_config_are_refused(tmp_path: Path) -> None:
    export_weights(random_run(tmp_path / "run", tiny_config()), tmp_path / "out", ExportSettings("native"))
    strip_header(tmp_path / "out")
    with pytest.raises(CheckpointError, match="--config"):
        import_weights(tmp_path / "out", tmp_path / "new", ImportSettings("native"))


def test_other_positions_are_refused(tmp_path: Path) -> None:
    export_weights(random_run(tmp_path / "run", tiny_config()), tmp_path / "out", ExportSettings("facebookresearch"))
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    tensors["pos_embed"][0, 0, 0] += 1e-3
    save_file(tensors, file, metadata)
    with pytest.raises(CheckpointError, match=r"pos_embed differs by 0\.001"):
        import_weights(tmp_path / "out", tmp_path / "new", ImportSettings("facebookresearch"))


def test_an_existing_run_is_left_alone(tmp_path: Path) -> None:
    run = random_run(tmp_path / "run", tiny_config())
    export_weights(run, tmp_path / "out", ExportSettings("native"))
    before = sorted(path for path in run.rglob("*"))
    with pytest.raises(CheckpointError, match="exists already"):
        import_weights(tmp_path / "out", run, ImportSettings("native"))
    assert sorted(path for path in run.rglob("*")) == before


class Marker:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


def test_b26_no_file_of_foreign_weights_is_unpickled(tmp_path: Path) -> None:
    config = tiny_config(time_freq_shift=1)
    run = random_run(tmp_path / "run", config)
    export_weights(run, tmp_path / "out", ExportSettings("diffusers", max_shard_bytes=50_000))
    marker = tmp_path / "executed"
    files = sorted((tmp_path / "out").iterdir())
    assert {path.suffix for path in files} == {".json", ".safetensors"} and len(files) > 3
    for path in files:
        content = path.read_bytes()
        for payload in (pickle.dumps(Marker(marker)), content[:-1]):
            path.write_bytes(payload)
            if payload == content[:-1] and payload.rstrip().endswith(b"}") and path.suffix == ".json":
                continue  # only the last newline is gone
            with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
                import_weights(tmp_path / "out", tmp_path / "new", ImportSettings("diffusers"))
        path.write_bytes(content)
    assert not marker.exists()
    import_weights(tmp_path / "out", tmp_path / "new", ImportSettings("diffusers"))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/outside.safetensors", "weights.bin", 3])
def test_b26_an_index_reaches_only_its_own_folder(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"")
    index = {"metadata": {}, "weight_map": {"x_embedder.proj.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="only files beside"):
        import_weights(folder, tmp_path / "new", ImportSettings("facebookresearch"))
