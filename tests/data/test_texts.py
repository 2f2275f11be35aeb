"""Texts beside pictures: stored ones row by row, made-up ones by number, and refusals that name the file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megadiff.config.load import load_config
from megadiff.config.schema import Config
from megadiff.data import BatchLoader, open_dataset
from megadiff.data.tensor_files import TextShape, join_text, read_texts
from megadiff.errors import DataError
from megadiff.models.sizes import text_size

SHAPE = TextShape(length=5, width=12, pooled=6)  # of unet-text-tiny-test


def config_of(preset: str, **settings: object) -> Config:
    return load_config(None, {"model.preset": preset, "train.global_batch_size": 4, **settings})


def tensors(count: int, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {
        "latents": torch.randn(count, 3, 8, 8, generator=generator),
        "tokens": torch.randn(count, SHAPE.length, SHAPE.width, generator=generator),
        "pooled": torch.randn(count, SHAPE.pooled, generator=generator),
        **changes,
    }


def write(path: Path, content: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    save_file({name: value.contiguous() for name, value in content.items()}, path)
    return content


def test_texts_of_all_files_come_with_their_latents(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"{name}.safetensors", tensors(count)) for name, count in (("a", 3), ("b", 2))]
    settings = {"data.name": "latents", "data.path": str(tmp_path)}
    dataset = open_dataset(config_of("unet-text-tiny-test", **settings))
    latents, tokens, pooled = (torch.cat([part[key] for part in parts]) for key in ("latents", "tokens", "pooled"))
    assert len(dataset) == 5
    for index in range(5):
        latent, text = dataset.load(index)
        assert torch.equal(latent, latents[index])
        assert torch.equal(text, torch.cat([tokens[index].flatten(), pooled[index]]))


def test_a_network_without_condition_needs_no_labels(tmp_path: Path) -> None:
    latents = write(tmp_path / "a.safetensors", {"latents": torch.randn(4, 3, 8, 8)})["latents"]
    settings = {"data.name": "latents", "data.path": str(tmp_path), "model.condition": "none"}
    dataset = open_dataset(config_of("unet-tiny-test", **settings, **{"sampling.guidance": 1.0}))
    assert torch.equal(dataset.load(3)[0], latents[3])
    batch = next(iter(BatchLoader(dataset, 0, 4, 4, prefetch_batches=0)))[0]
    assert batch.labels.dtype == torch.int64 and batch.labels.shape == (4,)


def test_changed_texts_change_the_fingerprint_of_their_folder(tmp_path: Path) -> None:
    settings = {"data.name": "latents", "data.path": str(tmp_path)}
    write(tmp_path / "a.safetensors", tensors(3))
    text = open_dataset(config_of("unet-text-tiny-test", **settings)).fingerprint
    bare = {**settings, "model.condition": "none", "sampling.guidance": 1.0}
    assert open_dataset(config_of("unet-tiny-test", **bare)).fingerprint != text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(3, 4, 12)}, r"tokens \(3, 4, 12\).*\(N, 5, 12\)"),
        ({"tokens": torch.zeros(2, 5, 12)}, r"tokens \(2, 5, 12\)"),
        ({"pooled": torch.zeros(3, 7)}, r"pooled \(3, 7\).*\(N, 6\)"),
        ({"tokens": torch.zeros(3, 5, 12, dtype=torch.int64)}, "tokens are I64; store floats"),
        ({"tokens": None}, r"no tensor 'tokens'; store latents \(N, 3, 8, 8\) and tokens \(N, 5, 12\)"),
        ({"pooled": None}, "no tensor 'pooled'"),
    ],
)
def test_texts_that_do_not_fit_are_refused_with_the_file(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    content = {name: value for name, value in {**tensors(3), **change}.items() if value is not None}
    write(tmp_path / "a.safetensors", content)
    settings = {"data.name": "latents", "data.path": str(tmp_path)}
    with pytest.raises(DataError, match=rf"a\.safetensors.*{message}"):
        open_dataset(config_of("unet-text-tiny-test", **settings))
    if "latents" not in message:
        with pytest.raises(DataError, match=r"a\.safetensors"):
            read_texts(tmp_path / "a.safetensors", SHAPE)


def test_a_text_that_is_not_finite_is_named_when_it_is_read(tmp_path: Path) -> None:
    content = tensors(3)
    content["tokens"][1, 0, 0] = float("inf")
    write(tmp_path / "a.safetensors", content)
    dataset = open_dataset(config_of("unet-text-tiny-test", **{"data.name": "latents", "data.path": str(tmp_path)}))
    dataset.load(0)
    with pytest.raises(DataError, match=r"row 1 of .*a\.safetensors is not finite \(text\)"):
        dataset.load(1)
    with pytest.raises(DataError, match="not finite"):
        read_texts(tmp_path / "a.safetensors", SHAPE)


def test_texts_of_a_file_without_latents(tmp_path: Path) -> None:
    content = tensors(2)
    write(tmp_path / "texts.safetensors", {name: content[name].half() for name in ("tokens", "pooled")})
    found = read_texts(tmp_path / "texts.safetensors", SHAPE)
    for row, text in enumerate(found):
        assert text.dtype == torch.float32
        assert torch.equal(text, join_text(content["tokens"][row].half(), content["pooled"][row].half()))
    with pytest.raises(DataError, match=r"cannot read .*nowhere"):
        read_texts(tmp_path / "nowhere.safetensors", SHAPE)


def test_made_up_texts_depend_on_their_number_only() -> None:
    config = config_of("unet-text-tiny-test", **{"data.name": "ids", "data.num_samples": 9})
    first, second = open_dataset(config), open_dataset(config)
    texts = torch.stack([first.load(index)[1] for index in range(9)])
    assert texts.shape == (9, text_size(config.model))
    assert len({tuple(text.tolist()) for text in texts}) == 9
    assert torch.equal(second.load(4)[1], texts[4])
    batches = next(iter(BatchLoader(first, 0, 4, 2, prefetch_batches=0)))
    for batch in batches:
        assert torch.equal(batch.labels, texts[batch.indices])
