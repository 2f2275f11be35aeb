"""Folders of small pictures, and local networks of a few weights in the place of published ones."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megadiff.evaluation.features import Features, FeatureSpace, fingerprint_of
from megadiff.models.inception import InceptionV3
from megadiff.models.vgg import Vgg16
from megadiff.sampling.images import save_png


def noise(count: int, size: int = 16, seed: int = 0) -> Tensor:
    """(N, 3, S, S) in [-1, 1]."""
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def save_set(folder: Path, images: Tensor, names: tuple[str, ...] = ()) -> Path:
    """Writes pictures as `00000.png`, or under the names."""
    for number, image in enumerate(images):
        save_png(image, folder / (names[number] if names else f"{number:05d}.png"))
    return folder


class CountingNetwork(nn.Module):
    """Features are means of quarters, logits two of them; counts the pictures it has seen."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor), requires_grad=False)
        self.seen = 0

    def forward(self, images: Tensor) -> Features:
        self.seen += len(images)
        values = nn.functional.adaptive_avg_pool2d(images, 2).flatten(1) * self.factor
        return Features(values, values[:, :2])


def counting_space(factor: float = 1.0) -> tuple[CountingNetwork, FeatureSpace]:
    network = CountingNetwork(factor)
    return network, FeatureSpace("quarters", network, fingerprint_of(network))


def save_inception(path: Path, num_classes: int = 1008, seed: int = 0) -> Path:
    """A seeded file of the names and shapes of the published one, with features of ordinary size."""
    torch.manual_seed(seed)
    network = InceptionV3()
    for name, value in network.state_dict().items():
        if value.dim() == 4:
            nn.init.kaiming_normal_(value)
        elif name.endswith(("running_mean", "bn.bias")):
            value.normal_(0, 0.1)
    values = {name: value for name, value in network.state_dict().items() if "num_batches" not in name}
    values["fc.weight"], values["fc.bias"] = torch.randn(num_classes, 2048) * 0.01, torch.randn(num_classes)
    save_file(values, path) if path.suffix == ".safetensors" else torch.save(values, path)
    return path


def save_vgg16(path: Path) -> Path:
    """A seeded file as torchvision's vgg16, with the classifier cut short."""
    torch.manual_seed(0)
    values = Vgg16().state_dict()
    for value in values.values():
        if value.dim() > 1:
            nn.init.kaiming_normal_(value)
    torch.save({**values, "classifier.6.bias": torch.zeros(3)}, path)
    return path


def save_vision(folder: Path, seed: int = 0) -> Path:
    """DINOv2 of two layers, as transformers saves it."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    Dinov2Model(Dinov2Config(**sizes, image_size=16, patch_size=8)).save_pretrained(str(folder))
    _save_preparation(folder, 16)
    return folder


def save_clip(folder: Path) -> Path:
    """CLIP of two layers a side, whose tokenizer knows letters only."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    tokenizer = CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[])
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": len(tokens), "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(
        text_config={**text, "pad_token_id": 1},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    CLIPModel(config).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    _save_preparation(folder, 16)
    return folder


def _save_preparation(folder: Path, size: int) -> None:
    square = {"height": size, "width": size}
    settings = {"do_resize": True, "size": {"shortest_edge": size}, "do_center_crop": True, "crop_size": square}
    settings |= {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True}
    settings |= {"image_processor_type": "CLIPImageProcessor", "resample": 3, "rescale_factor": 1 / 255}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
