"""A network and data that cost nothing, for runs that are about processes and not about learning."""

RUN_LENGTH = (
    "--train.steps", "6", "--optimizer.warmup_steps", "2", "--monitor.sample_every_steps", "0",
    "--monitor.tensorboard", "false",
)  # fmt: skip
SMALL = (
    "--model.input_size", "8", "--model.hidden_size", "32", "--model.num_layers", "2", "--model.num_heads", "2",
    *RUN_LENGTH,
)  # fmt: skip
_DATA = ("--data.name", "ids", "--data.num_samples", "64", "--train.global_batch_size", "8")
TINY = (*SMALL, "--model.num_classes", "2", *_DATA)
TINY_UNET = (*RUN_LENGTH, "--model.preset", "unet-tiny-test", *_DATA)
