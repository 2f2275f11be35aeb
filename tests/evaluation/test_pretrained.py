"""Local folders of transformers: features as the model itself gives them, CLIP score, and what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel, Dinov2Model, ViTConfig, ViTForImageClassification

from megadiff.data.dataset import to_signed_unit
from megadiff.errors import CheckpointError
from megadiff.evaluation.pretrained import ClipNetwork, clip_score, open_clip, open_folder
from megadiff.sampling.images import to_uint8
from tests.evaluation.sets import noise, save_clip, save_vision

PIXELS = to_uint8(noise(3, 24))
IMAGES = to_signed_unit(PIXELS)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


def prepared(folder: Path) -> torch.Tensor:
    processor = AutoImageProcessor.from_pretrained(str(folder))
    return processor(images=list(PIXELS.numpy()), return_tensors="pt")["pixel_values"]


@torch.no_grad()
def test_features_are_the_pooled_output(tmp_path: Path) -> None:
    folder = save_vision(tmp_path)
    space = open_folder(folder)
    found = space.network(IMAGES)
    expected = Dinov2Model.from_pretrained(str(folder)).eval()(prepared(folder)).pooler_output
    torch.testing.assert_close(found.values, expected)
    assert found.logits is None and space.name == f"dinov2 of {folder}" and not space.is_fid


def test_the_fingerprint_follows_weights_and_preparation(tmp_path: Path) -> None:
    folder = save_vision(tmp_path)
    first = open_folder(folder).fingerprint
    assert open_folder(folder).fingerprint == first
    settings = folder / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace("0.5", "0.4"))
    second = open_folder(folder).fingerprint
    model = Dinov2Model.from_pretrained(str(folder))
    model.layernorm.bias.data[0] += 1
    model.save_pretrained(str(folder))
    assert len({first, second, open_folder(folder).fingerprint}) == 3


@torch.no_grad()
def test_clip_gives_the_embeddings_that_transformers_compares(clip: Path) -> None:
    texts = ["a red fox", "cat"]
    space = open_clip(clip)
    network, model = space.network, CLIPModel.from_pretrained(str(clip)).eval()
    assert isinstance(network, ClipNetwork)
    tokens = AutoTokenizer.from_pretrained(str(clip))(texts, padding=True, return_tensors="pt")
    output = model(**tokens, pixel_values=prepared(clip))
    images, found = network(IMAGES).values, network.texts(texts)
    torch.testing.assert_close(torch.nn.functional.normalize(images), output.image_embeds)
    torch.testing.assert_close(torch.nn.functional.normalize(found), output.text_embeds)
    cosines = (output.image_embeds[:2] * output.text_embeds).sum(1)
    assert clip_score(images[:2], found) == pytest.approx(100 * float(cosines.clamp(min=0).mean()), rel=1e-5)
    assert open_folder(clip).fingerprint == space.fingerprint, "it is a feature space too"
    assert network.texts(["x" * 100]).shape == (1, 8), "long texts are cut off"


def test_clip_score_in_closed_cases() -> None:
    images = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    texts = torch.tensor([[5.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    assert clip_score(images, texts) == pytest.approx(100 * (1 + 0.5**0.5 + 0) / 3)


def test_weights_that_would_be_random_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A classifier's folder lacks the pooler, which transformers makes up."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(str(tmp_path))
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=r"lacks 2 weights of its ViTModel, such as pooler\.dense\.bias"):
        open_folder(tmp_path)
    assert capsys.readouterr() == ("", "")


def test_other_folders_are_refused_in_one_line(tmp_path: Path, clip: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json with a model_type"):
        open_folder(tmp_path)
    with pytest.raises(CheckpointError, match="holds a model of type dinov2; give a folder of transformers' CLIPModel"):
        open_clip(save_vision(tmp_path / "vision"))
    (tmp_path / "vision" / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot open .* with transformers' AutoImageProcessor") as error:
        open_folder(tmp_path / "vision")
    assert "\n" not in str(error.value)
