"""The table of naming conventions; a new one is one file and one line here."""

from collections.abc import Mapping
from typing import Literal

from megadiff.checkpoint.names import Convention
from megadiff.checkpoint.names_diffusers import DIFFUSERS
from megadiff.checkpoint.names_dit import FACEBOOKRESEARCH
from megadiff.checkpoint.names_native import NATIVE

ConventionName = Literal["native", "diffusers", "facebookresearch"]

CONVENTIONS: Mapping[ConventionName, Convention] = {
    "native": NATIVE,
    "diffusers": DIFFUSERS,
    "facebookresearch": FACEBOOKRESEARCH,
}
