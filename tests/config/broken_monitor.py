"""Configs that break a rule of the quality figures during training."""

from tests.config.cases import LATENTS, Cases

EVALUATED = {"monitor.evaluate_every_steps": 5}
WEIGHTS = {"monitor.evaluate_weights": "/weights.pth"}
INCEPTION = {"monitor.evaluate_features": "inception"}

BROKEN: Cases = {
    "_evaluation_sees_pictures": [
        (
            {**EVALUATED, **LATENTS, "model.in_channels": channels},
            ("evaluate_every_steps = 5", "data.name = latents", f"in_channels = {channels}", "= 0"),
            {"monitor.evaluate_every_steps": 0},
        )
        for channels in (3, 4)
    ]
    + [
        (
            {**EVALUATED, "data.name": "ids", "model.in_channels": 2},
            ("data.name = ids", "in_channels = 2"),
            {"model.in_channels": 1},
        )
    ],
    "_inception_has_weights": [
        ({**EVALUATED, **INCEPTION}, ("features = inception", "pt_inception-2015-12-05"), WEIGHTS)
    ],
    "_no_idle_evaluation_settings": [
        *(
            (
                {f"monitor.evaluate_{name}": value},
                (f"evaluate_{name} = {value}", "evaluate_every_steps = 0"),
                EVALUATED,
            )
            for name, value in (("images", 64), ("features", "/dinov2"))
        ),
        ({**INCEPTION, **WEIGHTS}, ("evaluate_features = inception", "evaluate_every_steps = 0"), EVALUATED),
        ({**EVALUATED, **WEIGHTS}, ("evaluate_weights = /weights.pth", "features = embedded"), INCEPTION),
    ],
}
