"""Image files of every kind become the same upright 8-bit RGB."""

from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from megadiff.data.pixels import read_square_rgb
from megadiff.errors import DataError

SIZE = 64
RAMP = numpy.tile(numpy.arange(0, 256, 4, dtype=numpy.uint8), (SIZE, 1))


def save(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def grey_ramp() -> Image.Image:
    return Image.fromarray(RAMP)


def sixteen_bit_ramp() -> Image.Image:
    return Image.fromarray(RAMP.astype(numpy.uint16) * 257)


@pytest.mark.parametrize(
    ("image", "suffix", "tolerance"),
    [
        (grey_ramp(), "png", 0),
        (grey_ramp().convert("RGB"), "png", 0),
        (grey_ramp().convert("P"), "png", 0),
        (grey_ramp().convert("LA"), "png", 0),
        (grey_ramp().convert("RGBA"), "webp", 12),
        (grey_ramp().convert("RGB").convert("CMYK"), "jpg", 4),
        (grey_ramp(), "bmp", 0),
        (sixteen_bit_ramp(), "png", 0),
    ],
    ids=["L", "RGB", "P", "LA", "RGBA-webp", "CMYK-jpeg", "L-bmp", "I;16"],
)
def test_b30_a_ramp_in_any_mode_gives_the_rgb_ramp(
    image: Image.Image, suffix: str, tolerance: int, tmp_path: Path
) -> None:
    pixels = read_square_rgb(save(image, tmp_path / f"ramp.{suffix}"), SIZE)
    assert pixels.shape == (3, SIZE, SIZE)
    assert pixels.dtype == torch.uint8
    difference = pixels.int() - torch.from_numpy(RAMP).int()
    assert difference.abs().max() <= tolerance


def test_b30_one_bit_images_become_black_and_white(tmp_path: Path) -> None:
    image = Image.fromarray(RAMP >= 128)
    pixels = read_square_rgb(save(image, tmp_path / "bits.png"), SIZE)
    assert torch.equal(pixels, torch.from_numpy((RAMP >= 128) * numpy.uint8(255)).expand(3, -1, -1))


def test_b30_big_endian_16_bit_grey_is_scaled(tmp_path: Path) -> None:
    content = (RAMP.astype(numpy.uint16) * 257).astype(">u2").tobytes()
    image = Image.frombytes("I;16B", (SIZE, SIZE), content)
    pixels = read_square_rgb(save(image, tmp_path / "big.tif"), SIZE)
    assert torch.equal(pixels[0], torch.from_numpy(RAMP))


def test_b30_an_animation_gives_its_first_picture(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    path = save(frames[0], tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    assert read_square_rgb(path, 8)[:, 0, 0].tolist() == [255, 0, 0]


def test_b30_float_pixels_are_refused_by_name(tmp_path: Path) -> None:
    path = save(Image.fromarray(RAMP.astype(numpy.float32)), tmp_path / "float.tif")
    with pytest.raises(DataError, match=r"float\.tif.*float pixels"):
        read_square_rgb(path, SIZE)


def test_transparency_goes_over_white(tmp_path: Path) -> None:
    clear = save(Image.new("RGBA", (8, 8), (255, 0, 0, 0)), tmp_path / "clear.png")
    half = save(Image.new("RGBA", (8, 8), (0, 0, 0, 128)), tmp_path / "half.png")
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([9, 9, 9])
    indexed = save(palette, tmp_path / "indexed.png", transparency=0)
    assert read_square_rgb(clear, 8).min() == 255
    assert read_square_rgb(half, 8).unique().tolist() == [127]
    assert read_square_rgb(indexed, 8).min() == 255


@pytest.mark.parametrize("orientation", range(1, 9))
def test_b29_all_exif_orientations_give_the_same_pixels(orientation: int, tmp_path: Path) -> None:
    upright = Image.new("RGB", (20, 40), "white")
    upright.paste("red", (0, 10, 10, 20))  # the upper left quarter of the central square
    inverse = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    stored = upright.transpose(inverse[orientation]) if orientation in inverse else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = read_square_rgb(save(stored, tmp_path / "photo.png", exif=exif), 20)
    assert pixels[1, :10, :10].max() == 0
    assert pixels[1, 10:].min() == 255 and pixels[1, :, 10:].min() == 255


def test_the_central_square_is_kept(tmp_path: Path) -> None:
    wide = Image.new("RGB", (60, 20), "blue")
    wide.paste("red", (20, 0, 40, 20))
    pixels = read_square_rgb(save(wide, tmp_path / "wide.png"), 10)
    assert pixels[0].min() > 230 and pixels[2].max() < 25  # the filter reaches a little beyond the cut


@pytest.mark.parametrize("shape", [(1, 1), (2000, 1)])
def test_b31_extreme_shapes_are_resized(shape: tuple[int, int], tmp_path: Path) -> None:
    assert read_square_rgb(save(Image.new("RGB", shape), tmp_path / "x.png"), 8).shape == (3, 8, 8)


def test_b31_a_file_beyond_pillows_size_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(Image.new("1", (300, 300)), tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    with pytest.raises(DataError, match=r"huge\.png"):
        read_square_rgb(path, 8)


@pytest.mark.parametrize("damage", ["half", "empty", "text"])
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_b31_an_unreadable_image_is_named(damage: str, suffix: str, tmp_path: Path) -> None:
    noise = numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
    path = save(Image.fromarray(noise), tmp_path / f"seven.{suffix}")
    content = path.read_bytes()
    path.write_bytes({"half": content[: len(content) // 2], "empty": b"", "text": b"a picture"}[damage])
    with pytest.raises(DataError, match=rf"seven\.{suffix}.*repair or remove"):
        read_square_rgb(path, 8)
