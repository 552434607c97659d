"""Training that starts from an exact conversion makes use of the streams."""

import pytest
import torch
from tiny import TRAINABLE, input_ids, new_parameters, tiny

import resswap


def train(model, steps=30):
    ids = input_ids(8, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    return model.eval()


def spread(model):
    """The distance of the streams from their mean after the last layer, relative to their size."""
    seen = []
    hook = model.model.stream_readout.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids())
    hook.remove()
    streams = seen[0].double()
    return ((streams - streams.mean(-2, keepdim=True)).norm() / streams.norm()).item()


def combs(model):
    return [connection.base[8:].detach().clone() for connection in resswap.connections(model).values()]


@pytest.mark.parametrize("scheme", ["mhc", "mhc_lite", "hc"])
def test_streams_part_and_comb_moves(scheme):
    model = resswap.convert(tiny("llama", torch.float64), scheme)
    before = combs(model)
    assert spread(model) < 1e-12
    train(model)
    assert spread(model) > 1e-2
    # In the first connection the streams are still equal, and mixing equal streams changes nothing.
    assert all((new - old).abs().max() > 1e-3 for new, old in zip(combs(model)[1:], before[1:], strict=True))


@pytest.mark.parametrize("scheme", ["mhc", "mhc_lite", "hc"])
def test_a_symmetric_start_never_parts(scheme):
    model = resswap.convert(tiny("llama", torch.float64), scheme)  # in float32, rounding parts them a little
    with torch.no_grad():
        for connection in resswap.connections(model).values():
            connection.base[:4] = torch.tensor(0.25).logit() if scheme != "hc" else 0.25
    train(model)
    assert spread(model) < 1e-6


@pytest.mark.parametrize("scheme", TRAINABLE)
def test_every_new_parameter_has_moved(scheme):
    model = resswap.convert(tiny("llama"), scheme)
    before = {name: p.detach().clone() for name, p in new_parameters(model).items()}
    train(model)
    for name, parameter in new_parameters(model).items():
        assert not torch.equal(parameter, before[name]), name
