"""What an evaluation found, as a table for people and as values for programs."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from megadiff.evaluation.paired import Fidelity
from megadiff.evaluation.quality import Quality


class Row(NamedTuple):
    """A figure: key in files, name for people, value, and which way is better."""

    key: str
    name: str
    value: float
    better: str


@dataclass(frozen=True)
class Subject:
    """What was compared in which space.

    Attributes:
        real, fake: where the pictures come from.
        num_images: of each.
        size: height and width.
        features: name of the feature space.
        fingerprint: of the feature space.
        dim: of the features.
        is_fid: whether published work calls the Frechet distance in this space FID.
    """

    real: str
    fake: str
    num_images: int
    size: tuple[int, int]
    features: str
    fingerprint: str
    dim: int
    is_fid: bool


@dataclass(frozen=True)
class TextMatch:
    """CLIP score of the fakes, the network that gave it, and where the texts come from."""

    score: float
    clip: str
    texts: str


@dataclass(frozen=True)
class Report:
    """All figures of an evaluation; those that were not asked for are None."""

    subject: Subject
    quality: Quality
    fidelity: Fidelity | None
    reference: str | None
    text_match: TextMatch | None

    def rows(self) -> list[Row]:
        """The figures in the order of the table."""
        quality, subject = self.quality, self.subject
        near, dense = f"k = {quality.precision_neighbours}", f"k = {quality.density_neighbours}"
        fid, kid = (" (FID)", " (KID)") if subject.is_fid else ("", "")
        rows = [
            Row("frechet_distance", f"Frechet distance{fid}", quality.frechet, "lower"),
            Row("kernel_distance", f"kernel distance{kid}", quality.kernel, "lower"),
            Row("precision", f"precision, {near}", quality.precision, "higher"),
            Row("recall", f"recall, {near}", quality.recall, "higher"),
            Row("density", f"density, {dense}", quality.density, "higher"),
            Row("coverage", f"coverage, {dense}", quality.coverage, "higher"),
        ]
        if quality.inception_score is not None:
            rows.append(Row("inception_score", "inception score", quality.inception_score, "higher"))
        if self.text_match is not None:
            rows.append(Row("clip_score", f"CLIP score, {self.text_match.texts}", self.text_match.score, "higher"))
        return rows + self._paired_rows()

    def _paired_rows(self) -> list[Row]:
        if self.fidelity is None:
            return []
        rows = [
            Row("psnr", "PSNR to reference, dB", self.fidelity.psnr, "higher"),
            Row("ssim", "SSIM to reference", self.fidelity.ssim, "higher"),
        ]
        if self.fidelity.lpips is not None:
            rows.append(Row("lpips", "LPIPS to reference, VGG-16", self.fidelity.lpips, "lower"))
        return rows

    def table(self) -> str:
        """Lines for a terminal: what was compared, then a figure a line."""
        subject, rows = self.subject, self.rows()
        height, width = subject.size
        about = [("real", subject.real), ("fake", subject.fake)]
        about += [("images", f"{subject.num_images} of each, {height} x {width} pixels")]
        about += [("features", f"{subject.features}, {subject.dim} dimensions")]
        about += [("reference", self.reference)] if self.reference is not None else []
        about += [("texts by", self.text_match.clip)] if self.text_match is not None else []
        width_of_names = max(len(row.name) for row in rows)
        lines = [f"{name:9}  {value}" for name, value in about]
        lines += ["", f"{'figure':{width_of_names}}  {'value':>12}  better"]
        return "\n".join(lines + [f"{row.name:{width_of_names}}  {row.value:12.5g}  {row.better}" for row in rows])

    def to_json(self) -> dict[str, Any]:
        """The same for `json.dumps`; an infinite value, which JSON lacks, is the text `inf`."""
        subject, quality = self.subject, self.quality
        about: dict[str, Any] = {"real": subject.real, "fake": subject.fake, "num_images": subject.num_images}
        about["height"], about["width"] = subject.size
        about["features"] = {"name": subject.features, "dim": subject.dim, "fingerprint": subject.fingerprint}
        about["is_fid"] = subject.is_fid
        about["neighbours"] = {"precision": quality.precision_neighbours, "density": quality.density_neighbours}
        if self.reference is not None:
            about["reference"] = self.reference
        if self.text_match is not None:
            about |= {"clip": self.text_match.clip, "texts": self.text_match.texts}
        return about | {"figures": {row.key: row.value if math.isfinite(row.value) else "inf" for row in self.rows()}}
