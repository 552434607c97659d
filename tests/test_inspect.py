"""resswap.inspect: what it measures is what it says, for any scheme and the plain model, and it changes nothing."""

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, SCHEMES, input_ids, randomise_connections, tiny
from torch import nn

import resswap
from resswap.schemes import Connection
from resswap.schemes.base import Add
from resswap.schemes.streams import ExpandStreams, MeanReadout, StreamMap

EXACT = [name for name, options in resswap.available_schemes().items() if options.preserves_function]


def batch():
    return {"input_ids": input_ids(), "labels": input_ids()}


def values(report, name):
    return [value for measures in report.measures if (value := getattr(measures, name)) is not None]


def model_of(scheme, model_type="llama"):
    model = tiny(model_type)
    if scheme != "residual":
        randomise_connections(resswap.convert(model, scheme))
    return model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_plain_model_is_measured_at_its_residual_adds(model_type):
    model = tiny(model_type)
    hidden = model(input_ids(), output_hidden_states=True).hidden_states
    loss = model(**batch()).loss.item()
    report = resswap.inspect(model, batch())
    assert (report.scheme, report.model, report.batch) == ("residual", type(model).__name__, (2, 16))
    assert report.loss == pytest.approx(loss, rel=1e-6)
    *connections, readout = report.measures
    assert len(connections) == 6
    for layer in range(3):  # hidden states 0 to 2 are what the layers get
        size = hidden[layer].square().mean().sqrt().item()
        assert connections[2 * layer].stream_rms == pytest.approx([size], rel=1e-5)
    assert readout.stream_rms == pytest.approx([readout.input_rms])
    assert all(m.gradient_norm > 0 for m in connections) and readout.gradient_norm is None
    assert not resswap.connections(model)


def test_branches_and_gradients_against_hooks_on_the_sublayers():
    model = tiny()
    outputs, inputs = [], []

    def keep(output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            module.register_forward_hook(
                lambda module, args, out: outputs.append(out[0] if type(out) is tuple else out)
            )
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    gradients = torch.autograd.grad(model(**batch()).loss, outputs)
    expected = [(x.square().mean().sqrt(), y.square().mean().sqrt()) for x, y in zip(inputs, outputs, strict=True)]
    for measures, (x, y), gradient in zip(resswap.inspect(model, batch()).measures, expected, gradients, strict=False):
        assert measures.input_rms == pytest.approx(x.item(), rel=1e-5)
        assert measures.output_rms == pytest.approx(y.item(), rel=1e-5)
        assert measures.gradient_norm == pytest.approx(gradient.norm().item(), rel=1e-4)


@pytest.mark.parametrize("scheme", EXACT)
def test_straight_after_conversion_branches_see_what_they_saw(scheme):
    model = tiny()
    plain = resswap.inspect(model, batch())
    converted = resswap.inspect(resswap.convert(model, scheme), batch())
    assert converted.loss == pytest.approx(plain.loss, rel=1e-5)
    for kind, number in (("input_rms", 7), ("output_rms", 6)):
        assert values(converted, kind) == pytest.approx(values(plain, kind), rel=1e-4)
        assert len(values(plain, kind)) == number


def test_use_of_streams_against_its_definition():
    model = model_of("mhc")
    connection = list(resswap.connections(model).values())[3]
    seen = []
    connection.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    measures = resswap.inspect(model, input_ids()).measures[3]
    streams, weights = seen[0], connection.weights(seen[0])
    shares = weights.write / weights.write.sum(-1, keepdim=True)
    entropy = -(shares * shares.log()).sum(-1).mean() / math.log(4)
    mean = streams.mean(-2, keepdim=True)
    assert measures.write == pytest.approx(weights.write.mean((0, 1)).tolist(), rel=1e-5)
    assert measures.read == pytest.approx(weights.read.mean((0, 1)).tolist(), rel=1e-5)
    assert measures.write_entropy == pytest.approx(entropy.item(), rel=1e-5)
    assert measures.write_dominance == pytest.approx(shares.amax(-1).mean().item(), rel=1e-5)
    assert measures.spread == pytest.approx(((streams - mean).norm() / streams.norm()).item(), rel=1e-5)
    assert measures.stream_rms == pytest.approx(streams.square().mean((0, 1, 3)).sqrt().tolist(), rel=1e-5)


def test_composite_gains_against_their_definition():
    model = model_of("hc")
    report = resswap.inspect(model, input_ids())
    seen = []
    for connection in resswap.connections(model).values():
        connection.register_forward_pre_hook(lambda module, args: seen.append(module.weights(args[0]).mixing.detach()))
    model(input_ids())
    product = torch.eye(4)
    for measures, comb in zip(report.measures, seen, strict=False):
        one = comb.transpose(-1, -2).abs()  # from old streams to new ones
        product = comb.transpose(-1, -2) @ product
        assert measures.gain_forward == pytest.approx(one.sum(-1).amax(-1).mean().item(), rel=1e-4)
        assert measures.gain_backward == pytest.approx(one.sum(-2).amax(-1).mean().item(), rel=1e-4)
        assert measures.composite_gain_forward == pytest.approx(product.abs().sum(-1).amax(-1).mean().item(), rel=1e-4)
        assert measures.composite_gain_backward == pytest.approx(
            product.abs().sum(-2).amax(-1).mean().item(), rel=1e-4
        )


def test_depth_attention_reads_from_all_sources():
    report = resswap.inspect(model_of("attnres"), input_ids())
    for index, measures in enumerate(report.measures):
        assert len(measures.read) == len(measures.stream_rms) == index + 1
        assert sum(measures.read) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("scheme", ["residual", *SCHEMES])
def test_nothing_changes(scheme):
    model = model_of(scheme)
    model(**batch()).loss.backward()
    model.train()
    model.model.layers[1].eval()
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    before = state(model)
    random = torch.get_rng_state()
    resswap.inspect(model, batch())
    assert_same(state(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    hook.remove()


@pytest.mark.parametrize("scheme", ["residual", "mhc", "attnres"])
@pytest.mark.parametrize("mistake", ["batch", "loss"])
def test_nothing_changes_on_an_error(scheme, mistake):
    model = model_of(scheme).train()
    before = state(model)
    with pytest.raises((RuntimeError, IndexError)):
        if mistake == "batch":
            resswap.inspect(model, torch.full((1, 4), 10**6))
        else:
            resswap.inspect(model, input_ids(), loss=lambda output: output.logits)  # not a scalar
    assert_same(state(model), before)


def state(model):
    """Everything about a model that inspection could change."""
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [
                list(module._forward_hooks),
                list(module._forward_pre_hooks),
                list(module._backward_hooks),
                list(module._backward_pre_hooks),
            ]
            for name, module in model.named_modules()
        },
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "trains": {name: p.requires_grad for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "config": copy.deepcopy(model.config.to_dict()),
    }


def assert_same(after, before):
    for key in before:
        assert after[key].keys() == before[key].keys()
        for name, value in before[key].items():
            same = (
                torch.equal(after[key][name], value) if isinstance(value, torch.Tensor) else after[key][name] == value
            )
            assert same, (key, name)


@pytest.mark.parametrize("scheme", ["residual", *SCHEMES])
def test_frozen_models_and_other_losses(scheme):
    model = model_of(scheme)
    expected = resswap.inspect(model, batch())
    model.requires_grad_(False)
    for report in (
        resswap.inspect(model, batch()),
        resswap.inspect(model, input_ids(), loss=lambda out: model.loss_function(out.logits, input_ids(), 128)),
    ):
        assert report.loss == pytest.approx(expected.loss, rel=1e-6)
        assert values(report, "gradient_norm") == pytest.approx(values(expected, "gradient_norm"), rel=1e-4)
    assert not any(p.requires_grad for p in model.parameters())
    assert all(m.gradient_norm is None for m in resswap.inspect(model, input_ids()).measures)


def test_hidden_states_and_caches_do_not_disturb():
    model = model_of("mhc")
    expected = resswap.inspect(model, input_ids()).to_dict()
    inputs = {"input_ids": input_ids(), "output_hidden_states": True, "use_cache": True}
    assert resswap.inspect(model, inputs).to_dict() == expected


@pytest.mark.parametrize("scheme", ["mhc", "hc"])
def test_layers_that_take_all_tokens_in_one_row(scheme):
    report = resswap.inspect(model_of(scheme, "opt"), batch())
    assert [len(m.stream_rms) for m in report.measures] == [4] * 7
    assert len(values(report, "spread")) == 7 and len(values(report, "composite_gain_forward")) == 6
    assert all(m.gradient_norm > 0 for m in report.measures[:-1])


@pytest.mark.parametrize("scheme", ["residual", "mhc", "attnres"])
def test_inference_mode(scheme):
    model = model_of(scheme)
    expected = resswap.inspect(model, batch())
    with torch.inference_mode():
        found = resswap.inspect(model, batch())
        assert torch.is_inference_mode_enabled()
    assert values(found, "gradient_norm") == pytest.approx(values(expected, "gradient_norm"))


def test_adapters_are_inspected():
    model = resswap.convert(tiny(), "attnres")
    expected = resswap.inspect(model, batch())
    tuned = get_peft_model(model, resswap.lora_config(model, r=4))
    found = resswap.inspect(tuned, batch())
    assert values(found, "read_entropy") == pytest.approx(values(expected, "read_entropy"), rel=1e-5)
    assert values(found, "gradient_norm") == pytest.approx(values(expected, "gradient_norm"), rel=1e-4)
    assert len(values(found, "gradient_norm")) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    for scheme in ("mhc", "attnres", "residual"):
        report = resswap.inspect(model_of(scheme).to(dtype), batch())
        assert all(math.isfinite(value) for value in report.summary().values())


def test_a_registered_scheme_of_ones_own_is_reported_too(monkeypatch):
    @dataclass(frozen=True)
    class Half(resswap.SchemeConfig):
        """Two streams, of which the branch reads the mean; it tells nothing about its weights."""

        scheme: ClassVar[str] = "half"

        def expand(self, hidden_size):
            return ExpandStreams(2)

        def connection(self, place):
            return HalfConnection(place.index)

        def stream_map(self, hidden_size, is_norm):
            return StreamMap()

        def readout(self, hidden_size, num_layers):
            return MeanReadout()

    class HalfConnection(Connection):
        def forward(self, streams):
            return streams.mean(-2), Add(streams, lambda streams, y: streams + y.unsqueeze(-2))

    monkeypatch.setitem(resswap.schemes.base._SCHEMES, "half", Half)
    report = resswap.inspect(resswap.convert(tiny(), "half"), batch())
    assert report.scheme == "half" and len(report.measures) == 7
    assert all(m.gradient_norm > 0 and len(m.stream_rms) == 2 and m.read is None for m in report.measures[:-1])
    assert "half" in str(report)


def test_what_cannot_be_inspected():
    with pytest.raises(resswap.UnsupportedModelError, match="not a model"):
        resswap.inspect("gpt2", input_ids())
    with pytest.raises(resswap.UnsupportedModelError, match="PreTrainedModel"):
        resswap.inspect(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(resswap.UnsupportedModelError, match="embed_tokens.weight is offloaded or not loaded"):
        resswap.inspect(tiny().to("meta"), input_ids())
    with pytest.raises(resswap.UnsupportedModelError, match="wraps the model"):
        resswap.inspect(get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"])), input_ids())
    with pytest.raises(resswap.OptionError, match="all of them are -100"):
        resswap.inspect(tiny(), {"input_ids": input_ids(), "labels": torch.full_like(input_ids(), -100)})
