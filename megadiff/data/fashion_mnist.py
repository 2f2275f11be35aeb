"""Fashion-MNIST from its published files in a local folder, for example of Debian's dataset-fashion-mnist."""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from megadiff.data.dataset import choose_classes, hash_parts, to_signed_unit
from megadiff.data.pixels import to_tensor
from megadiff.errors import DataError

CLASS_NAMES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_PADDED_UP_TO = 32
_UNSIGNED_BYTE = 0x08


class FashionMnist:
    """Grey pictures of clothes, the one channel repeated. Sizes 28 to 32 pad with black, others resize."""

    def __init__(
        self,
        folder: Path,
        input_size: int,
        in_channels: int,
        classes: tuple[str, ...] = (),
        split: Literal["train", "t10k"] = "train",
    ) -> None:
        """Read one split into memory.

        Args:
            folder: holds `train-images-idx3-ubyte.gz` and so on.
            input_size: height and width of the samples.
            in_channels: how often the grey channel is repeated.
            classes: names to keep, in the order of their class numbers; all of CLASS_NAMES if empty.
            split: the training or the test files.

        Raises:
            DataError: a file is missing or damaged, or a class is unknown.
        """
        pixels = read_idx(folder / f"{split}-images-idx3-ubyte.gz", num_dims=3)
        digits = read_idx(folder / f"{split}-labels-idx1-ubyte.gz", num_dims=1)
        if len(pixels) != len(digits) or (len(digits) and int(digits.max()) >= len(CLASS_NAMES)):
            raise DataError(
                f"{folder}: {len(pixels)} images and {len(digits)} labels of the split {split} "
                "do not belong together; copy both files from one source"
            )
        self.class_names = choose_classes(classes, CLASS_NAMES, "fashion_mnist")
        numbers = torch.tensor([CLASS_NAMES.index(name) for name in self.class_names])
        matches = digits.long()[:, None] == numbers
        kept = matches.any(dim=1)
        self.pixels = pixels[kept]
        self.labels = matches[kept].int().argmax(dim=1).tolist()
        self.input_size = input_size
        self.in_channels = in_channels
        content = (self.pixels.numpy().tobytes(), bytes(self.labels))
        self.fingerprint = hash_parts(("fashion_mnist", input_size, self.class_names, *content))

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.labels)

    def load(self, index: int) -> tuple[Tensor, int]:
        """Return picture `index` as ((C, H, W) float32 in [-1, 1], class)."""
        sized = resize_grey(self.pixels[index], self.input_size)
        return to_signed_unit(sized).expand(self.in_channels, -1, -1).clone(), self.labels[index]


def resize_grey(pixels: Tensor, size: int) -> Tensor:
    """Return a square (H, W) uint8 picture as (1, size, size): padded if it nearly fits, else resized."""
    extra = size - pixels.shape[-1]
    if extra >= 0 and size <= _PADDED_UP_TO:
        sides = (extra // 2, extra - extra // 2)
        return torch.nn.functional.pad(pixels[None], sides + sides)
    image = Image.fromarray(pixels.numpy())
    return to_tensor(image.resize((size, size), Image.Resampling.LANCZOS))


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Read a gzip-compressed IDX file of unsigned bytes (format: http://yann.lecun.com/exdb/mnist).

    Raises:
        DataError: names the file that is missing, damaged, or of another type or rank.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path} ({error}); data.path needs the published Fashion-MNIST files") from error
    header = 4 + 4 * num_dims
    if len(content) < header or content[:4] != bytes((0, 0, _UNSIGNED_BYTE, num_dims)):
        raise DataError(f"{path} is no IDX file of unsigned bytes with {num_dims} dimensions; copy it again")
    shape = struct.unpack(f">{num_dims}I", content[4:header])
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:]
    if values.numel() != int(torch.tensor(shape).prod()):
        raise DataError(f"{path} holds {values.numel()} values but its header says {shape}; copy it again")
    return values.view(shape)
