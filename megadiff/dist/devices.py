"""What devices can do at most, for the share that training reaches of it."""

import torch

# Dense tensor-core peaks in FLOP/s from the vendors' data sheets, by a part of the device's name; the first match
# counts. fp32 is what torch computes by default for matrix products, without TF32.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H200", {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "fp64": 66.9e12}),
    ("H100 PCIe", {"bf16": 756.0e12, "fp16": 756.0e12, "fp32": 51.2e12, "fp64": 51.2e12}),
    ("H100", {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "fp64": 66.9e12}),
    ("A100", {"bf16": 312.0e12, "fp16": 312.0e12, "fp32": 19.5e12, "fp64": 19.5e12}),
    ("A10G", {"bf16": 70.0e12, "fp16": 70.0e12, "fp32": 31.5e12}),
    ("L40S", {"bf16": 362.1e12, "fp16": 362.1e12, "fp32": 91.6e12}),
    ("L4", {"bf16": 121.0e12, "fp16": 121.0e12, "fp32": 30.3e12}),
    ("V100", {"fp16": 125.0e12, "fp32": 15.7e12, "fp64": 7.8e12}),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """The peak of one device in FLOP/s, or None where the table does not know it (every CPU).

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.
        precision: `bf16`, `fp16`, `fp32` or `fp64`.
    """
    for part, peaks in _PEAKS:
        if part in device_name:
            return peaks.get(precision)
    return None


def model_flops_utilisation(
    flops_per_second: float, device: torch.device, precision: str, world_size: int
) -> float | None:
    """The share of all devices' peak that the model's own operations reach (PaLM, Chowdhery et al. 2022, appendix B).

    Args:
        flops_per_second: operations of the whole run in a second, without recomputation.
        device: this rank's device; the others are taken to be alike.
        precision: of the matrix products.
        world_size: number of devices.

    Returns:
        A number in [0, 1], or None where the peak is not known.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name, precision)
    return None if peak is None else flops_per_second / (peak * world_size)
