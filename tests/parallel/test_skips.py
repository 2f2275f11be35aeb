"""Skips that stay on their rank: values and gradients as if they had travelled, in the order of the micro-batches."""

import torch

from megadiff.models import build_network
from megadiff.parallel.skips import SkipStore
from tests.parity.networks import UDIT, parity_config, probe


def test_values_and_gradients_of_several_micro_batches_keep_their_order() -> None:
    """Both halves of micro-batch 1 run before any backward pass, as in a pipeline."""
    store, weight = SkipStore(), torch.tensor(3.0, requires_grad=True)
    inputs = [torch.tensor(value, requires_grad=True) for value in (2.0, 5.0)]
    outputs = [store.leave((x * 1.0,), (x * weight,))[0] for x in inputs]
    received = [output.detach().requires_grad_() for output in outputs]
    results = [x * skip for x, skip in map(store.take, ((value,) for value in received))]
    for index in range(2):
        results[index].backward()
        outputs[index].backward(received[index].grad)
    assert [result.item() for result in results] == [2 * 2 * 3, 5 * 5 * 3]
    assert [x.grad.item() for x in inputs] == [2 * 2 * 3, 2 * 5 * 3]  # of x^2 w
    assert weight.grad.item() == 2 * 2 + 5 * 5
    assert store.is_empty


def test_halves_of_a_network_compute_what_the_whole_does() -> None:
    network, inputs = build_network(UDIT, 0), probe(parity_config(model=UDIT))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    network(inputs).square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    network.zero_grad()
    store, names = SkipStore(), network.layer_names
    first, second = network.part(names[:5], skips_stay=True), network.part(names[5:], skips_stay=True)
    x, condition, *skips = first(inputs)
    sent = store.leave((x, condition), tuple(skips))
    arrived = tuple(tensor.detach().requires_grad_() for tensor in sent)
    second(store.take(arrived)).square().sum().backward()
    torch.autograd.backward(sent, [tensor.grad for tensor in arrived])
    for name, parameter in network.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-5, atol=1e-5 * expected[name].abs().max()), name
    assert store.is_empty
