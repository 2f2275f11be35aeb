"""Peaks by device name, and the utilisation that is computed from them."""

import pytest
import torch

from megadiff.dist.devices import device_name, matrix_arithmetic, model_flops_utilisation, peak_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA RTX A6000", 154.8),
    ],
)
def test_names_as_drivers_give_them(name: str, tera: float) -> None:
    assert peak_flops(name, "bf16") == tera * 1e12


def test_no_peak_for_a_cpu_an_unknown_device_or_a_missing_arithmetic() -> None:
    assert peak_flops(device_name(torch.device("cpu")), "fp32") is None
    assert peak_flops("NVIDIA A1000 Laptop GPU", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "fp16") == 125e12


def test_tf32_counts_only_where_torch_uses_it() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert matrix_arithmetic("fp32") == "fp32"
        torch.set_float32_matmul_precision("high")
        assert matrix_arithmetic("fp32") == "tf32"
        assert matrix_arithmetic("bf16") == "bf16"
    finally:
        torch.set_float32_matmul_precision(before)


def test_utilisation_is_the_share_of_all_devices() -> None:
    """Published: DiT-XL/2 on one A100 takes 0.84 steps/s of 128 samples, 24.5 % of the peak."""
    flops_per_sample = 3 * 2 * 118.64e9  # 118.64 G multiply-adds forward (Peebles & Xie 2022, table 4)
    peak = peak_flops("NVIDIA A100-SXM4-80GB", "bf16")
    share = model_flops_utilisation(0.84 * 128, flops_per_sample, 1, peak)
    assert share == pytest.approx(0.245, rel=0.01)
    assert model_flops_utilisation(0.84 * 128, flops_per_sample, 2, peak) == pytest.approx(share / 2)
    assert model_flops_utilisation(1.0, 1.0, 1, None) is None
