"""GroupNorm-SiLU on a device where tensors are large: many blocks, and more elements than 32 bits count."""

import pytest
import torch
import torch.nn.functional as F

from megadiff.ops.group_norm_silu import group_norm_silu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device (torch.cuda.is_available() is False)", allow_module_level=True)

pytestmark = pytest.mark.gpu

CHANNELS, GROUPS = 128, 32
# A video autoencoder's, a UNet's in two passes and in one, and 2**31 + 2**23 elements.
SHAPES = [(1, CHANNELS, 20, 256, 256), (8, CHANNELS, 64, 64), (64, CHANNELS, 16, 16), (1, CHANNELS, 4112, 4096)]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_large_tensors_agree_with_eager_group_by_group(shape: tuple[int, ...], channels_last: bool) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 12 * 2 * torch.Size(shape).numel():
        pytest.skip("the GPU has too little memory for six tensors in bfloat16 and what eager adds")
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d if x.dim() == 5 else torch.channels_last)
    x.requires_grad_()
    weight, bias = (torch.randn(CHANNELS, device="cuda", requires_grad=True) for _ in range(2))
    y = group_norm_silu(x, GROUPS, weight, bias, kernels="required")
    grad = torch.randn_like(y)
    again = group_norm_silu(x, GROUPS, weight, bias, kernels="required")
    assert torch.equal(y, again)
    x_grad, *small = torch.autograd.grad(y, (x, weight, bias), grad)
    width = CHANNELS // GROUPS
    for group in (0, GROUPS // 2, GROUPS - 1):
        own = slice(group * width, (group + 1) * width)
        part = x.detach()[:, own].float().contiguous().requires_grad_()
        scale, offset = (values.detach()[own].requires_grad_() for values in (weight, bias))
        expected = F.silu(F.group_norm(part, 1, scale, offset))
        grads = torch.autograd.grad(expected, (part, scale, offset), grad[:, own].float().contiguous())
        # One rounding to bfloat16 beside float32's; sums over positions also collect float32's errors.
        torch.testing.assert_close(y[:, own].float(), expected.detach(), rtol=2**-8, atol=1e-4)
        torch.testing.assert_close(x_grad[:, own].float(), grads[0], rtol=2**-8, atol=1e-4)
        for ours, theirs in zip(small, grads[1:], strict=True):
            torch.testing.assert_close(ours[own], theirs, rtol=1e-3, atol=1e-4 * (x.numel() / CHANNELS) ** 0.5)
