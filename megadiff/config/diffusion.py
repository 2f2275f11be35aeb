"""What the settings of the noise process mean together, in closed form."""

from megadiff.config.schema import DiffusionConfig

# The densities and weights that need the squared gradient of each sample.
_OF_GRADIENTS = ("published", "gradient")


def ends_in_noise(diffusion: DiffusionConfig) -> bool:
    """Whether the last timestep has no signal at all (alpha = 0)."""
    return diffusion.schedule == "flow" or diffusion.zero_terminal_snr


def refits(diffusion: DiffusionConfig) -> bool:
    """Whether the timesteps' density or weights follow the losses of the run."""
    return diffusion.importance != "none" or diffusion.timestep_sampling == "adaptive"


def needs_gradients(diffusion: DiffusionConfig) -> bool:
    """Whether a refit reads gradient norms."""
    if diffusion.importance == "density":
        return diffusion.importance_density in _OF_GRADIENTS
    return diffusion.importance == "weight"


def compares_features(diffusion: DiffusionConfig) -> bool:
    """Whether the loss looks at features of the predicted clean picture."""
    return diffusion.perceptual_weight > 0 or diffusion.gram_weight > 0
