"""The plan of each network."""

from megadiff.config.schema import ModelConfig
from megadiff.parallel.plan import Plan


def dit_plan(model: ModelConfig) -> Plan:
    """DiT: heads and hidden features are sharded; modulations are computed in parts and joined."""
    return Plan(
        styles={
            "blocks.*.attn.[qkv]": "column",
            "blocks.*.attn.out": "row",
            "blocks.*.mlp.fc1": "column",
            "blocks.*.mlp.fc2": "row",
            "blocks.*.modulation": "joined_column",
        },
        regions=("blocks.*.attn", "blocks.*.mlp"),
        replicated=(
            "embed.patch.*",
            "embed.time.*.*",
            "embed.label.weight",
            "head.modulation.*",
            "head.out.*",
        ),
        partial=("blocks.*.attn.[qk]_norm.weight",) if model.qk_norm else (),
        sharded_dropout=("blocks.*.attn.dropout",),
        token_dropout=("blocks.*.dropout",),
        first_sharded="blocks.0",
        first_joined="head",
    )


def plan_for(model: ModelConfig) -> Plan:
    """The tensor-parallel plan of the network that `model` describes."""
    return {"dit": dit_plan}[model.name](model)
