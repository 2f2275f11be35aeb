"""A whole evaluation: features of both sets, their figures, and those of pairs and texts where these are given."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megadiff.errors import DataError
from megadiff.evaluation.captions import read_captions
from megadiff.evaluation.extract import Work, extract
from megadiff.evaluation.features import FeatureSpace
from megadiff.evaluation.images import ImageFiles, Images
from megadiff.evaluation.paired import measure_fidelity
from megadiff.evaluation.pretrained import ClipNetwork, clip_score
from megadiff.evaluation.quality import judge
from megadiff.evaluation.report import Report, Subject, TextMatch


@dataclass(frozen=True, eq=False)
class Inputs:
    """What is compared, and with what.

    Attributes:
        real, fake: as many pictures of one size each.
        reference: pictures of the names of the fakes, or None.
        space: for the figures of both sets.
        lpips: for pairs, or None.
        clip: of a `ClipNetwork`, for texts, or None.
        neighbours: see `judge`.
        caches: folders for the features of the real pictures, and of the fakes.
    """

    real: Images
    fake: ImageFiles
    reference: ImageFiles | None
    space: FeatureSpace
    lpips: nn.Module | None
    clip: FeatureSpace | None
    neighbours: int | None
    caches: tuple[Path, Path]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The figures, and the features (N, D) of both sets for pictures of them."""

    report: Report
    real: Tensor
    fake: Tensor


def evaluate(inputs: Inputs, work: Work) -> Evaluation:
    """Computes everything that the inputs ask for.

    Raises:
        DataError: the sets cannot be compared, a picture cannot be read, or a text is missing.
    """
    check_comparable(inputs.real, inputs.fake)
    match = _match_texts(inputs, work)
    fidelity = None
    if inputs.reference is not None:
        fidelity = measure_fidelity(inputs.fake, inputs.reference, inputs.lpips, work)
    real = extract(inputs.real, inputs.space, work, inputs.caches[0])
    fake = extract(inputs.fake, inputs.space, work, inputs.caches[1])
    real_values, fake_values = (part.values.to(work.device) for part in (real, fake))
    quality = judge(real_values, fake_values, fake.logits, inputs.neighbours)
    reference = None if inputs.reference is None else inputs.reference.title
    report = Report(_subject(inputs, real_values.shape[1]), quality, fidelity, reference, match)
    return Evaluation(report, real_values, fake_values)


def check_comparable(real: Images, fake: Images) -> None:
    """Refuses sets whose figures would mean nothing.

    Raises:
        DataError: they differ in size or number: the Frechet distance depends on both.
    """
    if real.size != fake.size:
        raise DataError(
            f"{real.title} has pictures of {real.size[0]} x {real.size[1]} pixels and {fake.title} of "
            f"{fake.size[0]} x {fake.size[1]}; resize all with --size"
        )
    if len(real) != len(fake):
        raise DataError(
            f"{real.title} has {len(real)} pictures and {fake.title} {len(fake)}, and the Frechet distance depends on "
            f"the number; use --num-images {min(len(real), len(fake))} for so many of each"
        )


@torch.no_grad()
def _match_texts(inputs: Inputs, work: Work) -> TextMatch | None:
    if inputs.clip is None:
        return None
    captions, origin = read_captions(inputs.fake.folder, inputs.fake.names)
    images = extract(inputs.fake, inputs.clip, work, inputs.caches[1]).values
    network = inputs.clip.network.to(work.device)
    assert isinstance(network, ClipNetwork)
    starts = range(0, len(captions), work.batch_size)
    texts = [network.texts(captions[start : start + work.batch_size]).cpu() for start in starts]
    return TextMatch(clip_score(images, torch.cat(texts)), inputs.clip.name, origin)


def _subject(inputs: Inputs, dim: int) -> Subject:
    real, fake, space = inputs.real, inputs.fake, inputs.space
    return Subject(real.title, fake.title, len(fake), fake.size, space.name, space.fingerprint, dim, space.is_fid)
