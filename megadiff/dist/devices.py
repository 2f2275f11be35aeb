"""Peak arithmetic of accelerators by their names, and how much of it a run uses."""

import re
from typing import Literal

import torch

Arithmetic = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]

# Dense peaks in TFLOP/s from the vendors' data sheets, without sparsity and with float32 accumulation; fp32
# is the rate of the ordinary cores, which matrix products use unless TF32 is switched on. A device has all
# the words of its key in its name.
_TFLOPS: dict[tuple[str, ...], dict[Arithmetic, float]] = {
    ("V100",): {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8},
    ("T4",): {"fp16": 65.0, "fp32": 8.1},
    ("A10",): {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    ("A10G",): {"bf16": 70.0, "fp16": 70.0, "tf32": 35.0, "fp32": 31.5},
    ("A30",): {"bf16": 165.0, "fp16": 165.0, "tf32": 82.0, "fp32": 10.3, "fp64": 10.3},
    ("A40",): {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    ("A6000",): {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
    ("A100",): {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5},
    ("A800",): {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 9.7},
    ("L4",): {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    ("L40",): {"bf16": 181.0, "fp16": 181.0, "tf32": 90.5, "fp32": 90.5},
    ("L40S",): {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6},
    ("H20",): {"bf16": 148.0, "fp16": 148.0, "tf32": 74.0, "fp32": 44.0},
    ("H100",): {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    ("H100", "PCIe"): {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.2, "fp64": 51.2},
    ("H100", "NVL"): {"bf16": 835.0, "fp16": 835.0, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0},
    ("H800",): {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
    ("H200",): {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    ("H200", "NVL"): {"bf16": 835.0, "fp16": 835.0, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0},
    ("GH200",): {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    ("B200",): {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 75.0, "fp64": 37.0},
    ("GB200",): {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0, "fp64": 40.0},
    ("MI300X",): {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4, "fp64": 163.4},
}


def device_name(device: torch.device) -> str:
    """The name that the driver gives a CUDA device, `cpu` for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def matrix_arithmetic(precision: Literal["fp64", "fp32", "bf16", "fp16"]) -> Arithmetic:
    """What matrix products of a precision run in: float32 becomes TF32 where torch is told to use it."""
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return precision


def peak_flops(name: str, arithmetic: Arithmetic) -> float | None:
    """Dense floating-point operations a second of a device.

    Args:
        name: as `device_name` gives it, such as `NVIDIA H100 80GB HBM3`.
        arithmetic: of the matrix products.

    Returns:
        The peak, or None for a CPU, an unknown device, and an arithmetic that the device lacks.
    """
    words = set(re.split(r"[\s-]+", name))
    fitting = [key for key in _TFLOPS if words.issuperset(key)]
    if not fitting:
        return None
    tera = _TFLOPS[max(fitting, key=len)].get(arithmetic)
    return None if tera is None else tera * 1e12


def model_flops_utilisation(
    samples_per_second: float, flops_per_sample: float, num_devices: int, peak: float | None
) -> float | None:
    """The share of the peak that the network's own operations take (MFU, Chowdhery et al. 2022, appendix B).

    Args:
        samples_per_second: of the whole run.
        flops_per_sample: forward and backward without recomputation (`training_flops`).
        num_devices: devices that share the work.
        peak: of one device, from `peak_flops`.

    Returns:
        A number in [0, 1], or None where there is no peak.
    """
    return None if peak is None else samples_per_second * flops_per_sample / (num_devices * peak)
