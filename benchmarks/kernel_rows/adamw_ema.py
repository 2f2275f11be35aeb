"""AdamW and moving average in one pass against torch's optimizers followed by a foreach lerp."""

import torch
from kernel_rows.timing import interleaved, speed_row
from report import Row

from megadiff.ops.adamw_ema import adamw_ema_

_DECAY = 0.999


def rows(repeats: int, quick: bool, device: str) -> list[Row]:
    """One row a peer; on CUDA also the share of the bandwidth of a copy."""
    numel = 1 << 16 if quick else 1 << 24
    peers = (
        {"foreach": (3.0, 3.3), "fused": (1.05, 1.12)}
        if device == "cpu"
        else {"foreach": (None, None), "fused": (None, None)}
    )
    found = [_against(name, numel, repeats, device, *limits) for name, limits in peers.items()]
    return found if device == "cpu" else [*found, _bandwidth(numel, repeats)]


def _ours(numel: int, device: str):  # type: ignore[no-untyped-def]
    tensors = [torch.randn(numel, device=device) for _ in range(5)]
    tensors[3].square_()

    def work() -> None:
        adamw_ema_(
            *tensors,
            lr=1e-4,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.01,
            step=10,
            ema_weight=1 - _DECAY,
            kernels="required",
        )

    return work


def _against(peer: str, numel: int, repeats: int, device: str, must: float | None, aim: float | None) -> Row:
    param = torch.nn.Parameter(torch.randn(numel, device=device))
    param.grad = torch.randn_like(param)
    average = torch.randn(numel, device=device)
    optimizer = torch.optim.AdamW([param], lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01, **{peer: True})

    def other() -> None:
        optimizer.step()
        torch._foreach_lerp_([average], [param.detach()], 1 - _DECAY)

    ours, theirs = interleaved(_ours(numel, device), other, repeats, device)
    note = f"{numel} float32 parameters against torch's {peer} AdamW and a foreach lerp"
    return speed_row(f"adamw_ema against {peer} AdamW + lerp", ours, theirs, must, aim, note)


def _bandwidth(numel: int, repeats: int) -> Row:
    """36 bytes a parameter: five shards read, four written."""
    source = torch.randn(4 * numel, device="cuda")
    sink = torch.empty_like(source)
    ours, copy = interleaved(_ours(numel, "cuda"), lambda: sink.copy_(source), repeats, "cuda")
    ratio = (36 * numel / ours) / (32 * numel / copy)
    return Row(
        "adamw_ema, share of copy bandwidth", 36 * numel / ours / 1e9, 32 * numel / copy / 1e9, "GB/s", ratio, 0.75
    )
