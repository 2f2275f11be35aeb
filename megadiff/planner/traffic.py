"""Bytes that one training step moves, in closed form, by kind of operation and size of group.

The payload of an operation is the whole tensor that it reduces, gathers, scatters or sends, on each rank that
takes part (what crosses a link is (n - 1) / n of it for a gather or scatter in a ring of n, and twice that
for a sum).

Left out, because they do not grow with the network: the sums of the loss and of the squared norm, the
pipeline's broadcast of two loss values, ZeRO's overflow flag and norm (all at most `SCALAR_ELEMENTS`
elements), and the shapes that a pipeline sends once, before its first step.
"""

from collections import Counter

from megadiff.config.layout import Layout
from megadiff.config.schema import Config
from megadiff.dist.traffic import Transfer
from megadiff.parallel.stage import DTYPES, stage_layers
from megadiff.planner.memory import StageParameters, stage_chain

SCALAR_ELEMENTS = 2
_ZERO3_LIMIT = 10**9  # DeepSpeed's default of both limits that decide how long parameters stay gathered
Bytes = Counter[Transfer]


def step_traffic(config: Config, layout: Layout, stage: int, parameters: StageParameters) -> Bytes:
    """The payload bytes of one optimizer step on a rank of a stage.

    Exact without activation checkpointing, which repeats some of the forward collectives, and at ZeRO 3 where
    either all parameters stay gathered between forward and backward or none does.

    Args:
        config: sizes of the network and precision.
        layout: degrees, micro-batch, accumulation and ZeRO stage.
        stage: number of the pipeline stage.
        parameters: `stage_parameters(config)[stage]`.
    """
    per_micro_batch = tensor_traffic(config, layout, stage) + pipeline_traffic(config, layout, stage)
    total = Counter({key: bytes_ * layout.accumulation for key, bytes_ in per_micro_batch.items()})
    total += data_traffic(config, layout, parameters)
    return total


def data_traffic(config: Config, layout: Layout, parameters: StageParameters) -> Bytes:
    """Gradients, and under ZeRO weights, between the data ranks in one step."""
    if layout.data == 1:
        return Counter()
    width = DTYPES[config.train.precision].itemsize
    whole = width * parameters.total
    if layout.zero_stage == 0:
        return Counter({Transfer("all_reduce", layout.data): whole})
    if layout.zero_stage == 3:
        padded = width * layout.data * sum(-(-size // layout.data) for size in parameters.sizes)
        return Counter(
            {
                Transfer("all_gather", layout.data): _gathers(config, parameters) * padded * layout.accumulation,
                Transfer("reduce_scatter", layout.data): padded * layout.accumulation,
            }
        )
    reductions = layout.accumulation if layout.zero_stage == 2 else 1
    return Counter(
        {
            Transfer("all_reduce", layout.data): whole * reductions,
            Transfer("all_gather", layout.data): whole,
        }
    )


def _gathers(config: Config, parameters: StageParameters) -> int:
    """How often ZeRO 3 gathers a parameter in a micro-batch: twice unless all may stay gathered."""
    zero = config.deepspeed.get("zero_optimization", {})
    limits = [zero.get(key, _ZERO3_LIMIT) for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance")]
    return 1 if parameters.total <= min(limits) else 2


def pipeline_traffic(config: Config, layout: Layout, stage: int) -> Bytes:
    """States forward and their gradients backward between neighbouring stages, for one micro-batch."""
    layers = stage_layers(config)
    sends = receives = 0
    if stage + 1 < len(layers):
        state = state_bytes(config, layout, before=layers[stage + 1][0])
        sends, receives = sends + state, receives + state
    if stage > 0:
        state = state_bytes(config, layout, before=layers[stage][0])
        sends, receives = sends + state, receives + state
    return Counter({Transfer("send", 2): sends, Transfer("recv", 2): receives})


def state_bytes(config: Config, layout: Layout, before: str) -> int:
    """Bytes of the tokens and the condition that enter the layer `before`, for one micro-batch."""
    split = config.parallel.sequence_parallel and before != "blocks.0"
    tokens = num_tokens(config) // (layout.tensor if split else 1)
    return _width(config) * layout.micro_batch_size * config.model.hidden_size * (tokens + 1)


def tensor_traffic(config: Config, layout: Layout, stage: int) -> Bytes:
    """The collectives of tensor and sequence parallelism of one stage, for one micro-batch.

    A block has two regions (attention and feed-forward), each with one collective on the tokens at its
    entrance and one at its exit, forward or backward; and a modulation, whose 6 vectors are gathered.
    """
    degree = layout.tensor
    if degree == 1:
        return Counter()
    layers = stage_layers(config)[stage]
    blocks = sum(name.startswith("blocks.") for name in layers)
    condition = _width(config) * layout.micro_batch_size * config.model.hidden_size
    tokens = condition * num_tokens(config)
    reduced, gathered, scattered = blocks * condition, blocks * 6 * condition, 0
    reduced += _partial_gradient_bytes(config, layers)
    if config.parallel.sequence_parallel:
        gathered += blocks * 4 * tokens + tokens * (("blocks.0" in layers) + ("head" in layers))
        scattered += blocks * (4 * tokens + 6 * condition)
    else:
        reduced += blocks * 4 * tokens
    kinds = {"all_reduce": reduced, "all_gather": gathered, "reduce_scatter": scattered}
    return Counter({Transfer(kind, degree): size for kind, size in kinds.items() if size})


def _partial_gradient_bytes(config: Config, layers: tuple[str, ...]) -> int:
    """Gradients of parameters that every tensor rank holds and of which each computes a part."""
    chain, sharding = stage_chain(config, layers)
    return _width(config) * sum(p.numel() for name, p in chain.named_parameters() if name in sharding.partial)


def num_tokens(config: Config) -> int:
    """Tokens of one picture."""
    return (config.model.input_size // config.model.patch_size) ** 2


def _width(config: Config) -> int:
    return DTYPES[config.train.precision].itemsize
