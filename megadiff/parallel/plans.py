"""The plan of each network."""

from dataclasses import replace
from functools import cache

from megadiff.config.schema import ModelConfig
from megadiff.models import meta_chain
from megadiff.models.unet_table import has_attention
from megadiff.parallel.plan import Plan, matches


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
        token_partial=("blocks.*.merge.*",) if model.long_skips else (),
        partial=("blocks.*.attn.[qk]_norm.weight",) if model.qk_norm else (),
        sharded_dropout=("blocks.*.attn.dropout",),
        token_dropout=("blocks.*.dropout",),
        first_sharded=("blocks.0",),
        first_joined=("head",),
    )


def unet_plan(model: ModelConfig) -> Plan:
    """UNet: channels inside a ResNet block, heads and hidden features are sharded; resampling is joined again."""
    unit = "*.*.*"  # path.level.index
    resnet = f"{unit}.resnet"
    vectors = ("time_shift", "time_scale") if model.resnet_time_scale_shift else ("time_shift",)
    plan = Plan(
        styles={
            f"{resnet}.conv1": "column",
            **{f"{resnet}.{name}": "column" for name in vectors},
            f"{resnet}.norm2": "groups",
            f"{resnet}.conv2": "row",
        },
        regions=(),
        entries=(f"{resnet}.conv1", *(f"{resnet}.{name}" for name in vectors)),
        replicated=("embed.conv.*", "embed.time.*.*", f"{resnet}.norm1.*", "head.norm.*", "head.conv.*"),
        sharded_dropout=(f"{resnet}.dropout",),
    )
    present = {name for name, _ in meta_chain(model).named_parameters()}
    junction = (f"{resnet}.junction.*.*", f"{resnet}.junction.*.*.*")
    optional = ("embed.label.weight", "embed.pooled.*.*", f"{resnet}.shortcut.*", *junction)
    replicated = tuple(p for p in optional if any(matches(p, name) for name in present))
    plan = replace(plan, replicated=plan.replicated + replicated)
    if model.resample == "conv" and len(model.block_out_channels) > 1:
        plan = replace(plan, styles={**plan.styles, "*.*.sample.conv": "joined_column"})
    if not has_attention(model):
        return plan
    return _with_transformers(plan, unit) if model.condition == "text" else _with_self_attention(plan, unit)


def _with_self_attention(plan: Plan, unit: str) -> Plan:
    attention = f"{unit}.attn.attention"
    return replace(
        plan,
        styles={**plan.styles, f"{attention}.[qkv]": "column", f"{attention}.out": "row"},
        regions=(attention,),
        replicated=(*plan.replicated, f"{unit}.attn.norm.*"),
        sharded_dropout=(*plan.sharded_dropout, f"{attention}.dropout"),
    )


def _with_transformers(plan: Plan, unit: str) -> Plan:
    block = f"{unit}.blocks.*"
    return replace(
        plan,
        styles={
            **plan.styles,
            f"{block}.self_attn.[qkv]": "column",
            f"{block}.self_attn.out": "row",
            f"{block}.cross_attn.[qkv]": "column",
            f"{block}.cross_attn.out": "row",
            f"{block}.mlp.fc1": "column",
            f"{block}.mlp.gate": "column",
            f"{block}.mlp.fc2": "row",
        },
        regions=(f"{block}.self_attn", f"{block}.cross_attn", f"{block}.mlp"),
        replicated=(*plan.replicated, f"{unit}.enter.*.*", f"{unit}.leave.linear.*"),
        token_partial=(f"{block}.norm[123].*",),
        sharded_dropout=(*plan.sharded_dropout, f"{block}.self_attn.dropout", f"{block}.cross_attn.dropout"),
        first_sharded=(f"{unit}.blocks.0",),
        first_joined=(f"{unit}.leave",),
    )


@cache
def plan_for(model: ModelConfig) -> Plan:
    """The tensor-parallel plan of the network that `model` describes."""
    return {"dit": dit_plan, "unet": unet_plan}[model.name](model)
