"""Configs that break a rule of the noise process, its densities and losses."""

from tests.config.cases import LATENTS, Cases

EPS, DENSITY = {"diffusion.prediction": "eps"}, {"diffusion.importance": "density"}
FEATURES = {"diffusion.perceptual_weight": 0.3, "diffusion.vgg_path": "/vgg.pth"}

BROKEN: Cases = {
    "_eps_sees_signal": [
        ({**EPS, "diffusion.schedule": "flow"}, ("prediction = eps", "schedule = flow"), {"diffusion.prediction": "v"}),
        (
            {**EPS, "diffusion.zero_terminal_snr": True},
            ("prediction = eps", "zero_terminal_snr = true"),
            {"diffusion.prediction": "x0"},
        ),
    ],
    "_one_density": [
        ({**DENSITY, "diffusion.timestep_sampling": name}, ("density", name), {"diffusion.importance": "weight"})
        for name in ("logit_normal", "adaptive")
    ],
    "_one_shift": [
        (
            {"diffusion.shift": 3.0, "diffusion.shift_base_tokens": 16},
            ("shift = 3.0", "shift_base_tokens = 16"),
            {"diffusion.shift_base_tokens": 0},
        )
    ],
    "_rescaled_schedule_has_two_ends": [
        (
            {"diffusion.zero_terminal_snr": True, "diffusion.num_train_timesteps": 1, "sampling.steps": 1},
            ("num_train_timesteps = 1", "at least 2"),
            {"diffusion.num_train_timesteps": 2},
        )
    ],
    "_levels_have_timesteps": [
        (
            {**DENSITY, "diffusion.num_levels": 1001},
            ("num_levels = 1001", "= 1000"),
            {"diffusion.num_levels": 1000},
        )
    ],
    "_refit_happens": [
        (
            {**DENSITY, "diffusion.refit_from_step": 1000},
            ("= 1000", "at most 999"),
            {"diffusion.refit_from_step": 999},
        )
    ],
    "_features_have_weights": [
        ({"diffusion.perceptual_weight": 0.3}, ("perceptual_weight", "vgg_path"), {"diffusion.vgg_path": "/vgg.pth"}),
        ({"diffusion.gram_weight": 0.3}, ("gram_weight", "vgg_path"), {"diffusion.vgg_path": "/vgg.pth"}),
    ],
    "_features_see_pixels": [
        ({**FEATURES, **LATENTS}, ("data.name = latents", "vae_path"), {"diffusion.vae_path": "/vae"}),
        (
            {**FEATURES, "data.name": "ids", "model.in_channels": 4},
            ("in_channels = 4", "1 or 3"),
            {"model.in_channels": 3},
        ),
        ({**FEATURES, "model.input_size": 2}, ("input_size = 2", "at least 4"), {"model.input_size": 4}),
    ],
    "_no_idle_diffusion_settings": [
        *(
            ({f"diffusion.{name}": value}, (name, "perceptual_weight = 0"), FEATURES)
            for name, value in (("perceptual_min_snr", 2.0), ("vgg_path", "/vgg.pth"))
        ),
        ({**FEATURES, "diffusion.vae_path": "/vae"}, ("vae_path", "data.name = emoji"), LATENTS),
        ({"diffusion.min_snr_gamma": 4.0}, ("min_snr_gamma", "uniform"), {"diffusion.loss_weight": "min_snr"}),
        (
            {"diffusion.hybrid_linear_fraction": 0.7},
            ("hybrid_linear_fraction = 0.7", "cosine"),
            {"diffusion.schedule": "hybrid"},
        ),
        (
            {"diffusion.zero_terminal_snr": True, "diffusion.schedule": "flow"},
            ("zero_terminal_snr", "schedule = flow"),
            {"diffusion.schedule": "cosine"},
        ),
        (
            {"diffusion.logit_normal_mean": 0.5},
            ("logit_normal_mean", "uniform"),
            {"diffusion.timestep_sampling": "logit_normal"},
        ),
        (
            {"diffusion.logit_normal_std": 0.5, "diffusion.timestep_sampling": "adaptive"},
            ("logit_normal_std", "adaptive"),
            {"diffusion.timestep_sampling": "logit_normal"},
        ),
        (
            {"diffusion.importance_density": "loss", "diffusion.importance": "weight"},
            ("importance_density = loss", "importance = weight"),
            {"diffusion.importance": "density"},
        ),
        *(
            (
                {f"diffusion.{name}": 50},
                (f"{name} = 50", "importance = none"),
                {"diffusion.timestep_sampling": "adaptive"},
            )
            for name in ("num_levels", "refit_from_step", "refit_every_steps")
        ),
    ],
}
