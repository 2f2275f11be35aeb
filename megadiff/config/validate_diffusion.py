"""Rules between the settings of the noise process. Each check raises one sentence with values and remedy."""

from megadiff.config.checks import Check, Idle, refuse_idle
from megadiff.config.diffusion import compares_features, ends_in_noise, refits
from megadiff.config.schema import Config
from megadiff.errors import ConfigError

_VGG_MIN_SIZE = 4  # two halvings


def _eps_sees_signal(config: Config) -> None:
    diffusion = config.diffusion
    if diffusion.prediction == "eps" and ends_in_noise(diffusion):
        cause = "diffusion.zero_terminal_snr = true" if diffusion.zero_terminal_snr else "diffusion.schedule = flow"
        raise ConfigError(
            "diffusion.prediction = eps tells nothing about x0 at the last timestep, which is pure noise with "
            f"{cause}; use diffusion.prediction = v"
        )


def _one_density(config: Config) -> None:
    diffusion = config.diffusion
    if diffusion.importance == "density" and diffusion.timestep_sampling != "uniform":
        raise ConfigError(
            f"diffusion.importance = density and diffusion.timestep_sampling = {diffusion.timestep_sampling} both say "
            "how often a timestep is drawn; use timestep_sampling = uniform or importance = weight"
        )


def _one_shift(config: Config) -> None:
    diffusion = config.diffusion
    if diffusion.shift_base_tokens and diffusion.shift != 1.0:
        raise ConfigError(
            f"diffusion.shift = {diffusion.shift} and diffusion.shift_base_tokens = {diffusion.shift_base_tokens} both "
            "set the shift; remove one of them"
        )


def _rescaled_schedule_has_two_ends(config: Config) -> None:
    diffusion = config.diffusion
    if diffusion.zero_terminal_snr and diffusion.num_train_timesteps < 2:
        raise ConfigError(
            "diffusion.zero_terminal_snr = true with diffusion.num_train_timesteps = 1 leaves noise alone; use at "
            "least 2 timesteps"
        )


def _levels_have_timesteps(config: Config) -> None:
    diffusion = config.diffusion
    if refits(diffusion) and diffusion.num_levels > diffusion.num_train_timesteps:
        raise ConfigError(
            f"diffusion.num_levels = {diffusion.num_levels} is above diffusion.num_train_timesteps = "
            f"{diffusion.num_train_timesteps}; use at most {diffusion.num_train_timesteps}"
        )


def _refit_happens(config: Config) -> None:
    start, steps = config.diffusion.refit_from_step, config.train.steps
    if refits(config.diffusion) and start is not None and start >= steps:
        raise ConfigError(
            f"diffusion.refit_from_step = {start} is not below train.steps = {steps}, so that nothing is refitted; use "
            f"at most {steps - 1}"
        )


def _features_have_weights(config: Config) -> None:
    if compares_features(config.diffusion) and not config.diffusion.vgg_path:
        raise ConfigError(
            "diffusion.perceptual_weight and gram_weight need VGG-19, but diffusion.vgg_path is not set; "
            "give torchvision's weight file vgg19-....pth"
        )


def _features_see_pixels(config: Config) -> None:
    diffusion, is_latent = config.diffusion, config.data.name == "latents"
    if compares_features(diffusion) and is_latent and not diffusion.vae_path:
        raise ConfigError(
            "diffusion.perceptual_weight and gram_weight compare pictures, but data.name = latents holds none and "
            "diffusion.vae_path is not set; give the folder of the VAE that made the latents"
        )
    if compares_features(diffusion) and not is_latent and config.model.in_channels not in (1, 3):
        raise ConfigError(
            f"diffusion.perceptual_weight and gram_weight compare pictures, but model.in_channels = "
            f"{config.model.in_channels}; use 1 or 3"
        )
    if compares_features(diffusion) and not is_latent and config.model.input_size < _VGG_MIN_SIZE:
        raise ConfigError(
            f"model.input_size = {config.model.input_size} is too small for the features of "
            f"diffusion.perceptual_weight and gram_weight; use at least {_VGG_MIN_SIZE}"
        )


def _no_idle_diffusion_settings(config: Config) -> None:
    diffusion = config.diffusion
    schedule, sampling = diffusion.schedule, diffusion.timestep_sampling
    uniform, still = diffusion.loss_weight == "uniform", not refits(diffusion)
    normal = f"timestep_sampling = {sampling}; use logit_normal"
    density = f"importance = {diffusion.importance}; use density"
    refit = "importance = none; use importance = density or weight, or timestep_sampling = adaptive"
    plain = not compares_features(diffusion)
    features = "perceptual_weight = 0 and gram_weight = 0; use for example perceptual_weight = 0.3"
    refuse_idle(
        config,
        (
            Idle("diffusion", "min_snr_gamma", uniform, "loss_weight = uniform; use min_snr"),
            Idle("diffusion", "hybrid_linear_fraction", schedule != "hybrid", f"schedule = {schedule}; use hybrid"),
            Idle("diffusion", "zero_terminal_snr", schedule == "flow", "schedule = flow, which ends in noise anyway"),
            Idle("diffusion", "logit_normal_mean", sampling != "logit_normal", normal),
            Idle("diffusion", "logit_normal_std", sampling != "logit_normal", normal),
            Idle("diffusion", "importance_density", diffusion.importance != "density", density),
            Idle("diffusion", "num_levels", still, refit),
            Idle("diffusion", "refit_from_step", still, refit),
            Idle("diffusion", "refit_every_steps", still, refit),
            Idle("diffusion", "perceptual_min_snr", plain, features),
            Idle("diffusion", "vgg_path", plain, features),
            Idle("diffusion", "vae_path", plain, features),
            Idle("diffusion", "vae_path", config.data.name != "latents", f"data.name = {config.data.name}; remove it"),
        ),
    )


DIFFUSION_CHECKS: tuple[Check, ...] = (
    _eps_sees_signal,
    _one_density,
    _one_shift,
    _rescaled_schedule_has_two_ends,
    _levels_have_timesteps,
    _refit_happens,
    _features_have_weights,
    _features_see_pixels,
    _no_idle_diffusion_settings,
)
