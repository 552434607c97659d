"""The numbers that Probe gives are what they say, and watching changes nothing."""

import copy
import math

import pytest
import torch
from peft import get_peft_model
from tiny import TRAINABLE, input_ids, randomise_connections, tiny

import resswap
from resswap import diagnostics


@pytest.mark.parametrize("scheme", ["mhc", "mhc_lite", "hc"])
def test_straight_after_conversion_streams_are_alike_and_mixing_is_doubly_stochastic(scheme):
    values = diagnostics.health(resswap.convert(tiny(), scheme), input_ids())
    assert values["stream_spread"] < 1e-6
    assert values["doubly_stochastic_error"] < 1e-4
    assert values["gain_forward"] == pytest.approx(1, abs=1e-4)
    assert values["gain_backward"] == pytest.approx(1, abs=1e-4)


def test_the_residual_stream_is_what_is_measured():
    model = tiny()
    states = model(input_ids(), output_hidden_states=True).hidden_states  # the last one is normalised
    values = diagnostics.health(resswap.convert(model, "mhc"), input_ids())
    assert values["stream_rms_first"] == pytest.approx(states[0].square().mean().sqrt().item(), rel=1e-5)
    assert values["stream_rms_last"] >= values["stream_rms_first"]
    assert values["stream_rms_max"] >= values["stream_rms_last"]


@pytest.mark.parametrize("scheme", ["mhc", "mhc_lite", "hc"])
def test_gain_and_error_against_their_definition(scheme):
    model = resswap.convert(tiny(num_hidden_layers=2), scheme)
    randomise_connections(model, std=0.5)
    seen = []
    for connection in resswap.connections(model).values():
        connection.register_forward_pre_hook(lambda module, args: seen.append(module.weights(args[0]).mixing.detach()))
    values = diagnostics.health(model, input_ids())
    product = torch.eye(4)
    for comb in seen:
        product = comb.transpose(-1, -2) @ product  # maps the streams at the start to those at the end
    assert len(seen) == 4
    assert values["gain_forward"] == pytest.approx(product.abs().sum(-1).amax(-1).mean().item(), rel=1e-4)
    assert values["gain_backward"] == pytest.approx(product.abs().sum(-2).amax(-1).mean().item(), rel=1e-4)
    if scheme != "hc":  # Sinkhorn keeps the gain near 1 where hc's goes where it likes
        assert values["doubly_stochastic_error"] < 0.1 and values["gain_forward"] < 1.1
    else:
        assert values["doubly_stochastic_error"] > 0.5 and values["gain_forward"] > 1.5
    assert values["stream_spread"] > 0.1


def test_the_mixing_is_what_the_connection_does():
    """With a branch that gives nothing, the new streams are the old ones mixed."""
    for scheme in ("mhc", "mhc_lite", "hc"):
        model = resswap.convert(tiny(), scheme)
        randomise_connections(model)
        connection = list(resswap.connections(model).values())[1]
        streams = torch.randn(2, 3, 4, 64)
        _, add = connection(streams)
        expected = torch.einsum("...jk,...jc->...kc", connection.weights(streams).mixing, streams)
        torch.testing.assert_close(add(torch.zeros(2, 3, 64)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["attnres", "block_attnres"])
def test_the_entropy_of_depth_attention(scheme):
    model = resswap.convert(tiny(), scheme)
    values = diagnostics.health(model, input_ids())
    assert values["read_entropy"] == pytest.approx(1, abs=1e-5)  # all sources weigh the same
    assert "gain_forward" not in values and "stream_spread" not in values
    with torch.no_grad():
        model.model.stream_readout.query.copy_(100 * torch.randn(64))
    values = diagnostics.health(model, input_ids())
    assert values["read_entropy_last"] < 0.5
    assert values["read_entropy"] > values["read_entropy_last"]


@pytest.mark.parametrize("scheme", ["attnres", "block_attnres"])
def test_the_depth_weights_are_what_the_connection_does(scheme):
    model = resswap.convert(tiny(), scheme)
    randomise_connections(model)
    sources = None

    def keep(module, args, output):
        nonlocal sources
        sources = args[0], output

    hook = model.model.stream_readout.register_forward_hook(keep)
    model(input_ids())
    hook.remove()
    weights = model.model.stream_readout.weights(sources[0]).read
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-6)
    x = weights.shape[-1] * sum(w[..., None] * v for w, v in zip(weights.unbind(-1), sources[0].values, strict=True))
    torch.testing.assert_close(sources[1], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("scheme", TRAINABLE)
def test_watching_leaves_no_trace(scheme, checkpointing):
    model = resswap.convert(tiny(), scheme)
    randomise_connections(model)
    watched = copy.deepcopy(model)
    for each in (model, watched):
        if checkpointing:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        each.train()
    model(input_ids(), labels=input_ids()).loss.backward()
    with diagnostics.Probe(watched) as probe:
        watched(input_ids(), labels=input_ids()).loss.backward()
    assert all(math.isfinite(value) for value in probe.values().values()) and probe.values()
    for (name, p), q in zip(model.named_parameters(), watched.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    hooks = [
        [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in each.modules()]
        for each in (model, watched)
    ]
    assert hooks[0] == hooks[1]
    norm = torch.stack([p.grad.norm() for p in resswap.added_parameters(model).values() if p.grad is not None]).norm()
    assert diagnostics.connection_grad_norm(watched) == pytest.approx(norm.item(), rel=1e-5)


def test_adapters_are_watched_too():
    model = resswap.convert(tiny(), "attnres")
    tuned = get_peft_model(model, resswap.lora_config(model, r=4))
    assert diagnostics.health(tuned, input_ids())["read_entropy_last"] == pytest.approx(1, abs=1e-5)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "stream_readout.modules_to_save" in name and name.endswith("query"):
                parameter.copy_(100 * torch.randn(64))
    assert diagnostics.health(tuned, input_ids())["read_entropy_last"] < 0.5


def test_what_cannot_be_watched():
    with pytest.raises(resswap.UnsupportedModelError, match="not converted"):
        diagnostics.Probe(tiny())
    model = resswap.convert(tiny(), "mhc")
    with diagnostics.Probe(model) as probe:
        assert probe.values() == {}
    assert diagnostics.connection_grad_norm(model) is None
