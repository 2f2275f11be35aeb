"""What the configs that break rules are made of."""

from typing import Any

# name of the check -> (settings that break it, parts of the message, settings that repair it)
Cases = dict[str, list[tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]]]

LATENTS = {"data.name": "latents", "data.path": "/latents"}
# 16 and 32 channels on 8 x 8 and 4 x 4 pixels in 8 groups; the second level and the middle attend, in heads of 8.
UNET = {"model.preset": "unet-tiny-test"}
# The same with texts and a transformer at both levels.
TEXT = {"model.preset": "unet-text-tiny-test", **LATENTS}
