"""Each sample's gradient by the output layer, read off the backward pass that a step does anyway."""

import torch
from torch import Tensor, nn

from megadiff.models.chain import Chain


class OutputGradient:
    """Squared norms of the exact per-sample gradients of weight and bias of the network's last layer.

    They stand for the norm of the whole gradient (Katharopoulos and Fleuret 2018 bound it by the last layer's). The
    gradient of a linear layer's weight is the sum over tokens of (output's gradient) x (input), so that input and
    output's gradient of the batch give it for each sample at the cost of one more product.
    """

    def __init__(self, chain: Chain) -> None:
        """Watches the last layer of a chain that has it; the head is never compiled or computed again."""
        head = chain.layer("head")
        layer = head.get_submodule("conv" if "conv" in head._modules else "out")
        assert isinstance(layer, nn.Linear | nn.Conv2d), "an output layer"
        self.layer = layer
        self._latest: tuple[Tensor, Tensor] | None = None
        self._norms: list[Tensor] = []
        layer.register_forward_hook(self._remember)

    def _remember(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._latest = (inputs[0].detach(), output) if output.requires_grad else None

    def watch(self, losses: Tensor) -> None:
        """Waits for the backward pass of the latest forward pass.

        Args:
            losses: (B,) the loss of each sample, from which the caller makes any multiple of their sum; the multiple
                is divided out again.
        """
        assert self._latest is not None, "a loss without a forward pass"
        (inputs, output), self._latest = self._latest, None
        index, scale = len(self._norms), [torch.ones_like(losses)]
        self._norms.append(torch.full_like(losses, torch.nan))

        def take_scale(grad: Tensor) -> None:
            scale[0] = grad

        def measure(grad: Tensor) -> None:
            wide = grad.to(scale[0].dtype) / scale[0].view(-1, *[1] * (grad.dim() - 1))
            self._norms[index] = squared_norms(self.layer, inputs.to(wide.dtype), wide)

        losses.register_hook(take_scale)
        output.register_hook(measure)

    def take(self) -> Tensor | None:
        """(B,) squared norms since the last call, in the order of `watch`; None without any."""
        norms, self._norms = self._norms, []
        return torch.cat(norms) if norms else None


@torch.no_grad()
def squared_norms(layer: nn.Linear | nn.Conv2d, inputs: Tensor, grads: Tensor) -> Tensor:
    """||d L_b / d weight||^2 + ||d L_b / d bias||^2 of each sample, (B,).

    Args:
        layer: linear, or a convolution of stride 1 with padding.
        inputs: (B, N, D) or (B, D, H, W), what the layer saw.
        grads: (B, N, O) or (B, O, H, W), gradients of its output.
    """
    if isinstance(layer, nn.Linear):
        return _squared(torch.einsum("bno,bnd->bod", grads, inputs)) + _squared(grads.sum(1))
    height, width = grads.shape[2:]
    pad_y, pad_x = (int(pad) for pad in layer.padding)
    padded = nn.functional.pad(inputs, (pad_x, pad_x, pad_y, pad_y))
    total = _squared(grads.sum((2, 3)))
    # One product for each element of the kernel: unfolding the input would take as many times its memory.
    for y in range(layer.kernel_size[0]):
        for x in range(layer.kernel_size[1]):
            seen = padded[:, :, y : y + height, x : x + width]
            total += _squared(torch.einsum("bohw,bdhw->bod", grads, seen))
    return total


def _squared(values: Tensor) -> Tensor:
    return values.square().flatten(1).sum(1)
