"""Classifier-free guidance and the update of a sampler in one pass; a solver is a set of coefficients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megadiff.ops.library import Kernels, use_kernel


def solver_step(
    output: Tensor,
    x: Tensor,
    *,
    to_m: Sequence[float],
    next_weights: Sequence[float],
    guidance: float | None = None,
    clip: float = 0.0,
    h1: Tensor | None = None,
    h2: Tensor | None = None,
    noise: Tensor | None = None,
    x_last: Tensor | None = None,
    corrector_weights: Sequence[float] = (),
    keep_m: bool = True,
    kernels: Kernels = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The next state from the network's answer; no gradient flows.

        guided = null + guidance (conditional - null)
        m = to_m[0] x + to_m[1] guided, clamped to [-clip, clip]: the predicted clean sample
        base = x, or with a corrector c[0] x_last + c[1] h1 + c[2] h2 + c[3] m
        next = n[0] base + n[1] m + n[2] h1 + n[3] h2 + n[4] noise

    DDIM and Euler need n[0] and n[1] (and n[4] where noise is added), DPM-Solver++(2M) h1 as well, UniPC all of it.

    Args:
        output: (B, C or more, ...), whose first C channels count; (2B, ...) with guidance: conditional, then null.
        x: (B, C, ...), what the network saw, in output's dtype or wider.
        to_m: two numbers that turn x and the answer into the predicted clean sample.
        next_weights: five numbers n.
        guidance: the scale, or None for an answer without a null half.
        clip: limit of the predicted clean sample, 0 for none.
        h1, h2: the m of one and two steps ago, like x.
        noise: like x.
        x_last: the base of one step ago, with `corrector_weights`.
        corrector_weights: four numbers c, or none for no corrector.
        keep_m: whether m is wanted; solvers without a memory need not write it.
        kernels: whether the fused kernel may run.

    Returns:
        next, m (empty unless kept) and base (empty without a corrector), like x.
    """
    answer, state = output.detach().contiguous(), x.detach().contiguous()
    last, first, second, fresh = (None if t is None else t.detach().contiguous() for t in (x_last, h1, h2, noise))
    if state.dtype not in (answer.dtype, torch.float32, torch.float64):
        raise TypeError(f"solver_step: x is {state.dtype}; expected {answer.dtype}, float32 or float64")
    double = torch.float64 in (answer.dtype, state.dtype)
    fused = not double and use_kernel("solver_step", kernels, state)
    run = torch.ops.megadiff.solver_step if fused else reference
    weights = list(next_weights), list(corrector_weights)
    return run(answer, state, last, first, second, fresh, list(to_m), clip, *weights, guidance, keep_m)


@torch.no_grad()
def reference(
    output: Tensor,
    x: Tensor,
    x_last: Tensor | None,
    h1: Tensor | None,
    h2: Tensor | None,
    noise: Tensor | None,
    to_m: Sequence[float],
    clip: float,
    next_weights: Sequence[float],
    corrector_weights: Sequence[float],
    guidance: float | None,
    keep_m: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain PyTorch, with the arguments of `torch.ops.megadiff.solver_step`."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, output.dtype), torch.float32)
    guided = output[:, : x.shape[1]].to(dtype)
    if guidance is not None:
        conditional, null = guided.chunk(2)
        guided = torch.lerp(null, conditional, guidance)
    state = x.to(dtype)
    m = to_m[0] * state + to_m[1] * guided
    if clip > 0:
        m = m.clamp(-clip, clip)
    base = state
    if corrector_weights:
        base = _weighted(corrector_weights, (x_last, h1, h2, m), dtype)
    following = _weighted(next_weights, (base, m, h1, h2, noise), dtype)
    absent = x.new_empty(0)
    return following.to(x.dtype), m.to(x.dtype) if keep_m else absent, base.to(x.dtype) if corrector_weights else absent


def _weighted(weights: Sequence[float], tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    terms = [weight * tensor.to(dtype) for weight, tensor in zip(weights, tensors, strict=True) if tensor is not None]
    return sum(terms[1:], start=terms[0])


def register(library: str) -> None:
    """Tells torch the shapes of the operator of `torch.ops.<library>`; it has no gradient."""
    torch.library.register_fake(f"{library}::solver_step", _fake)


def _fake(
    output: Tensor,
    x: Tensor,
    x_last: Tensor | None,
    h1: Tensor | None,
    h2: Tensor | None,
    noise: Tensor | None,
    to_m: Sequence[float],
    clip: float,
    next_weights: Sequence[float],
    corrector_weights: Sequence[float],
    guidance: float | None,
    keep_m: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    m, base = (torch.empty_like(x) if wanted else x.new_empty(0) for wanted in (keep_m, len(corrector_weights) > 0))
    return torch.empty_like(x), m, base
