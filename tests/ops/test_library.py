"""Which calls take a kernel: the setting, the dtype, a library that was not built or does not load."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megadiff.errors import ConfigError
from megadiff.ops import library
from megadiff.ops.library import describe_kernels, use_kernel
from megadiff.ops.weighted_mse import weighted_mse

CPU = torch.device("cpu")


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installation without compiled libraries."""
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    for cached in (library._load, library._tell_once):
        cached.cache_clear()
    yield tmp_path
    library._load.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_built_library_serves_these_dtypes(dtype: torch.dtype) -> None:
    x = torch.empty(0, dtype=dtype)
    assert use_kernel("diffuse", "auto", x) and use_kernel("diffuse", "required", x)
    assert not use_kernel("diffuse", "off", x)


def test_float64_takes_the_reference_and_is_refused_where_kernels_are_required() -> None:
    x = torch.empty(0, dtype=torch.float64)
    assert not use_kernel("diffuse", "auto", x)
    with pytest.raises(ConfigError, match=r"required, but diffuse has no kernel here: float64 has no kernels"):
        use_kernel("diffuse", "required", x)


def test_without_a_library_references_run_and_say_so_once(empty_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    output, target = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    with caplog.at_level(logging.INFO, "megadiff.ops.library"):
        for _ in range(2):
            loss = weighted_mse(output, target, torch.ones(2))
    torch.testing.assert_close(loss, (output - target).square().sum(1))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "weighted_mse runs as PyTorch reference" in told[0] and "was not built" in told[0]
    with pytest.raises(ConfigError, match=r"_kernels_cpu.abi3.so was not built; run `pip install"):
        weighted_mse(output, target, torch.ones(2), kernels="required")


def test_a_damaged_library_is_named(empty_folder: Path) -> None:
    (empty_folder / "_kernels_cpu.abi3.so").write_bytes(b"no library")
    assert "does not load beside torch" in str(library.library_error("cpu"))


def test_the_log_line(empty_folder: Path) -> None:
    names = ("diffuse", "weighted_mse")
    assert (
        describe_kernels("off", names, CPU, torch.float32)
        == "kernels: off, PyTorch references of diffuse, weighted_mse"
    )
    line = describe_kernels("auto", names, CPU, torch.float32)
    assert line.startswith("kernels: none (_kernels_cpu.abi3.so was not built") and line.endswith(
        "diffuse, weighted_mse"
    )


def test_the_log_line_names_the_kernels_in_use() -> None:
    names = ("diffuse", "weighted_mse")
    assert describe_kernels("auto", names, CPU, torch.float32) == "kernels: cpu diffuse, weighted_mse"
    assert "float64 has no kernels" in describe_kernels("auto", names, CPU, torch.float64)
    with pytest.raises(ConfigError, match="required"):
        describe_kernels("required", names, CPU, torch.float64)


def test_meta_tensors_pass_through_the_kernels_of_the_cpu() -> None:
    x = torch.empty(2, 3, device="meta")
    assert use_kernel("diffuse", "required", x)
    assert weighted_mse(x, x, torch.empty(2, device="meta"), kernels="required").shape == (2,)
