"""`megadiff evaluate` from folders, and from a run, to the table and files; and its refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from megadiff.cli_evaluate import main
from megadiff.config.load import load_config
from megadiff.data.emoji import open_emoji
from megadiff.errors import MegadiffError
from megadiff.evaluation.embedded import open_embedded
from tests.checkpoint.networks import random_run
from tests.evaluation.sets import noise, save_clip, save_inception, save_set, save_vgg16, save_vision

ROOT = Path(__file__).parent.parent
NAMES = tuple(f"{number:05d}_red_fox.png" for number in range(12))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the embedded network, so that it is trained once."""
    folder = tmp_path_factory.mktemp("cache")
    open_embedded(folder)
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders real, fake and reference of 12 pictures of 16 pixels."""
    root = tmp_path_factory.mktemp("sets")
    dataset = open_emoji(16, "category")
    images = torch.stack([dataset.load(40 * index)[0] for index in range(24)])
    save_set(root / "real", images[:12])
    save_set(root / "reference", images[12:], NAMES)
    save_set(root / "fake", images[12:] + 0.2 * noise(12), NAMES)
    save_set(root / "fake", noise(1, 80), ("grid.png",))
    return root


def flags(sets: Path, cache: Path, *others: str | Path) -> list[str]:
    given = ("--real", sets / "real", "--fake", sets / "fake", "--cache", cache, *others)
    return [str(value) for value in given]


def figures(output: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((output / "quality.json").read_text())["figures"]
    return found


def test_folders_to_table_and_files(
    sets: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(flags(sets, cache, "--output", tmp_path / "out", "--reference", sets / "reference"))
    printed = capsys.readouterr().out
    assert "features   embedded emoji classifier, 64 dimensions" in printed and "12 of each, 16 x 16" in printed
    assert "FID" not in printed and "PSNR to reference" in printed and printed.endswith("quality.png\n")
    found = figures(tmp_path / "out")
    assert list(found)[:4] == ["frechet_distance", "kernel_distance", "precision", "recall"]
    assert 20 < found["psnr"] < 26 and 0.5 < found["ssim"] < 1 and "lpips" not in found
    with Image.open(tmp_path / "out" / "quality.png") as picture:
        assert picture.size[0] > 1000
    main(flags(sets, cache, "--output", tmp_path / "again"))
    again = figures(tmp_path / "again")
    assert again == {key: value for key, value in found.items() if key not in ("psnr", "ssim")}


def test_the_cache_lies_beside_the_pictures_and_is_no_picture(
    tmp_path: Path, sets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = save_vision(tmp_path / "dinov2")
    for name in ("real", "fake"):
        save_set(tmp_path / name, noise(8, seed=len(name)))
    arguments = ["--real", tmp_path / "real", "--fake", tmp_path / "fake", "--features", network]
    main([str(value) for value in arguments])
    first = capsys.readouterr().out
    assert f"dinov2 of {network}, 16 dimensions" in first and "inception score" not in first
    assert len(list((tmp_path / "real" / ".features").iterdir())) == 1
    assert len(list((tmp_path / "fake" / ".features").iterdir())) == 1
    main([str(value) for value in arguments])
    assert capsys.readouterr().out == first


def test_fewer_images_are_chosen_where_sets_differ(sets: Path, cache: Path, tmp_path: Path) -> None:
    """Pairs stay pairs."""
    save_set(tmp_path / "real", noise(20))
    changed = ["--real", str(tmp_path / "real"), *flags(sets, cache)[2:]]
    with pytest.raises(MegadiffError, match=r"real has 20 pictures and .*fake 12, .*use --num-images 12"):
        main(changed)
    out = tmp_path / "out"
    main([*changed, "--num-images", "9", "--output", str(out), "--reference", str(sets / "reference")])
    assert json.loads((out / "quality.json").read_text())["num_images"] == 9
    assert figures(out)["psnr"] > 20


def test_only_inception_gives_fid(sets: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = save_inception(tmp_path / "pt_inception.safetensors")
    main(flags(sets, cache, "--features", "inception", "--weights", weights, "--num-images", "6"))
    printed = capsys.readouterr().out
    assert "Frechet distance (FID)" in printed and "InceptionV3 of pt_inception.safetensors, 2048 dim" in printed
    assert "inception score" in printed


def test_texts_and_learned_distance(sets: Path, cache: Path, tmp_path: Path) -> None:
    clip, vgg, out = save_clip(tmp_path / "clip"), save_vgg16(tmp_path / "vgg16.pth"), tmp_path / "out"
    pairs = ["--reference", sets / "reference", "--lpips", vgg]
    main(flags(sets, cache, "--clip", clip, *pairs, "--output", out, "--batch-size", "5"))
    found = json.loads((out / "quality.json").read_text())
    assert found["texts"] == "file names" and -100 <= found["figures"]["clip_score"] <= 100
    assert found["figures"]["lpips"] > 0


def test_a_run_gives_the_pictures_that_it_learns(
    sets: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(
        None,
        {
            "model.input_size": 16,
            "model.in_channels": 3,
            "model.patch_size": 4,
            "model.hidden_size": 24,
            "model.num_layers": 1,
            "model.num_heads": 2,
            "model.num_classes": 2,
            "data.name": "emoji",
            "data.classes": ("Food & Drink", "Flags"),
            "data.balanced": True,
        },
    )
    random_run(tmp_path / "run", config)
    main(["--real", str(tmp_path / "run"), *flags(sets, cache)[2:], "--num-images", "12"])
    assert f"real       emoji of {tmp_path / 'run'}\n" in capsys.readouterr().out
    with pytest.raises(MegadiffError, match=r"--size = 8, but .*run learns 16 pixels; leave --size out"):
        main(["--real", str(tmp_path / "run"), *flags(sets, cache)[2:], "--num-images", "12", "--size", "8"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--neighbours", "0"], "--neighbours = 0 is too small; use 1 or more"),
        (["--num-images", "1"], "--num-images = 1 is too small; use 2 or more"),
        (["--num-images", "13"], "--num-images = 13 exceeds the 12 pictures"),
        (["--neighbours", "12"], "12 real pictures are too few for 12 neighbours each"),
        (["--features", "inception"], "--features inception needs --weights FILE, pt_inception-2015"),
        (["--weights", "x.pth"], "--weights belongs to --features inception; leave it out for embedded"),
        (["--features", "resnet"], "--features = resnet is no feature space; use embedded, inception, or a local"),
        (["--lpips", "vgg16.pth"], "--lpips compares with a reference; give --reference"),
        (["--device", "abacus"], "--device = abacus cannot be used"),
        (["--clip", "/nowhere"], "/nowhere has no config.json"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(sets: Path, cache: Path, given: list[str], message: str) -> None:
    with pytest.raises(MegadiffError) as error:
        main(flags(sets, cache, *given))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sets_of_two_sizes_are_refused_and_resized(sets: Path, cache: Path, tmp_path: Path) -> None:
    save_set(tmp_path, noise(12, 20))
    changed = ["--real", str(tmp_path), *flags(sets, cache)[2:]]
    with pytest.raises(MegadiffError, match=r"pictures of 20 x 20 pixels and .* of 16 x 16; resize all with --size"):
        main(changed)
    main([*changed, "--size", "16"])


def test_the_command_ends_with_one_line_and_exit_code_2(sets: Path) -> None:
    command = [sys.executable, "-m", "megadiff.cli", "evaluate", "--real", "/nowhere", "--fake", str(sets / "fake")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "megadiff: error: /nowhere is not a folder; give a folder of PNG or JPEG files\n"
