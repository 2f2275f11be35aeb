"""The table, the values for programs, and the picture."""

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from megadiff.evaluation.images import open_files
from megadiff.evaluation.paired import Fidelity
from megadiff.evaluation.picture import draw
from megadiff.evaluation.quality import Quality
from megadiff.evaluation.report import Report, Subject, TextMatch
from tests.evaluation.sets import noise, save_set

QUALITY = Quality(1.25, -0.5, 0.75, 0.5, 1.5, 0.25, 3.0, 3, 5)
SUBJECT = Subject("photos", "samples", 40, (32, 24), "quarters", "abc", 12, is_fid=False)
PLAIN = Report(SUBJECT, replace(QUALITY, inception_score=None), None, None, None)
FULL = Report(SUBJECT, QUALITY, Fidelity(math.inf, 0.9, 0.1), "many", TextMatch(25.0, "clip of x", "file names"))


def test_the_table_is_aligned_and_names_the_features() -> None:
    head, _, figures = FULL.table().partition("\n\n")
    assert "features   quarters, 12 dimensions" in head and "images     40 of each, 32 x 24 pixels" in head
    lines = figures.splitlines()
    assert len(lines) == 12 and len({line.rstrip("abcdefghijklmnopqrstuvwxyz").__len__() for line in lines}) == 1
    assert lines[1].split() == ["Frechet", "distance", "1.25", "lower"]
    assert lines[4].split() == ["recall,", "k", "=", "3", "0.5", "higher"]
    assert "CLIP score, file names" in figures and lines[-1].startswith("LPIPS") and lines[-1].endswith("lower")


def test_only_what_was_measured_is_shown() -> None:
    keys = [row.key for row in PLAIN.rows()]
    assert keys == ["frechet_distance", "kernel_distance", "precision", "recall", "density", "coverage"]
    assert "reference" not in PLAIN.table() and "texts" not in PLAIN.table()
    assert not {"reference", "clip", "texts"} & PLAIN.to_json().keys()


def test_only_inceptions_distance_is_called_fid() -> None:
    assert "FID" not in FULL.table() and "KID" not in FULL.table()
    inception = replace(FULL, subject=replace(SUBJECT, is_fid=True)).table()
    assert "Frechet distance (FID)" in inception and "kernel distance (KID)" in inception


def test_json_holds_the_same_and_is_strict() -> None:
    found = json.loads(json.dumps(FULL.to_json(), allow_nan=False))
    assert found["figures"] == {row.key: row.value for row in FULL.rows()} | {"psnr": "inf"}
    assert found["features"] == {"name": "quarters", "dim": 12, "fingerprint": "abc"}
    assert (found["height"], found["width"], found["num_images"]) == (32, 24, 40)
    assert (found["reference"], found["clip"], found["texts"]) == ("many", "clip of x", "file names")
    assert found["neighbours"] == {"precision": 3, "density": 5} and found["is_fid"] is False


def test_the_picture_is_drawn_of_few_and_of_equal_pictures(tmp_path: Path) -> None:
    files = open_files(save_set(tmp_path / "set", noise(3)), None, 1)
    for features in (torch.randn(3, 2), torch.zeros(3, 2)):
        draw(tmp_path / "quality.png", files, files, features, features, "a title")
        with Image.open(tmp_path / "quality.png") as image:
            assert image.size[0] > 1000
        (tmp_path / "quality.png").unlink()
