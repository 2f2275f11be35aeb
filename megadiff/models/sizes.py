"""Sizes of a network's inputs and outputs."""

from megadiff.config.schema import ModelConfig


def output_channels(model: ModelConfig) -> int:
    """C, or 2 C where the network also holds the channels of a learnt variance."""
    return model.in_channels * (2 if model.learn_sigma else 1)


def text_size(model: ModelConfig) -> int:
    """Numbers of a text condition: tokens and pooled vector; 0 where the network reads no text."""
    reads_text = model.name == "unet" and model.condition == "text"
    return model.text_length * model.cross_attention_dim + model.pooled_dim if reads_text else 0
