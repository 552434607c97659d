"""What cannot be converted says why, and is left exactly as it was."""

import copy
import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import SCHEMES, TRAINABLE, input_ids, logits, randomise_connections, tiny
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, ViTConfig, ViTModel, XLNetConfig, XLNetLMHeadModel

import resswap
from resswap.schemes.mhc import MHCConfig


def snapshot(model):
    return (
        {name: type(module) for name, module in model.named_modules()},
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        type(model.config),
        model.config.to_dict(),
    )


def assert_unchanged(model, before):
    classes, tensors, config_class, config = before
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert type(model.config) is config_class and model.config.to_dict() == config
    state = model.state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("mch", {}, "There is no scheme 'mch'; available: .*mhc"),
        (["mhc"], {}, r"There is no scheme \['mhc'\]; available: .*mhc"),
        (None, {}, "There is no scheme None; available: .*mhc"),
        ("mhc", {"streams": 4}, "no option 'streams'; its options: num_streams, comb_diagonal"),
        ("mhc", {"num_streams": 0}, "num_streams=0; allowed: a whole number from 2"),
        ("mhc", {"num_streams": 4.0}, "num_streams=4.0; allowed: a whole number from 2"),
        ("mhc", {"num_streams": np.float64(4)}, "num_streams=4.0; allowed: a whole number from 2"),
        ("mhc", {"num_streams": True}, "num_streams=True; allowed"),
        ("mhc", {"comb_diagonal": 0.1}, "comb_diagonal=0.1; allowed: from 1/num_streams"),
        ("mhc", {"pre_peak": 0.25}, "pre_peak=0.25; allowed: greater than 1/num_streams"),
        ("hc", {"dynamic": 1}, "dynamic=1; allowed: True or False"),
        ("hc", {"num_streams": -1}, "num_streams=-1; allowed: a whole number from 1"),
        ("block_attnres", {"num_blocks": 0}, "num_blocks=0; allowed: a whole number from 1"),
    ],
)
def test_unknown_schemes_and_options(scheme, options, message):
    model = tiny("llama")
    before = snapshot(model)
    with pytest.raises(resswap.OptionError, match=message):
        resswap.convert(model, scheme, **options)
    assert_unchanged(model, before)


def test_numbers_of_numpy_are_options_too():
    model = resswap.convert(tiny("llama"), num_streams=np.int64(3), eps=np.float32(0.5))
    options = model.config.residual["options"]
    assert (options["num_streams"], options["eps"]) == (3, 0.5)
    assert {type(options[name]) for name in ("num_streams", "eps")} == {int, float}
    assert json.loads(model.config.to_json_string())["residual"]["options"] == options


def test_converted_twice():
    model = resswap.convert(tiny("llama"))
    before = snapshot(model)
    with pytest.raises(resswap.UnsupportedModelError, match=r"already converted .* call resswap\.revert\(model\)"):
        resswap.convert(model, "attnres")
    assert_unchanged(model, before)


@pytest.mark.parametrize("thing", [None, "llama", torch.nn.Linear(2, 2), torch.zeros(1)])
def test_not_a_model(thing):
    with pytest.raises(resswap.UnsupportedModelError, match="is not a transformers PreTrainedModel"):
        resswap.convert(thing)


@pytest.mark.parametrize("function", [resswap.connections, resswap.diff, resswap.revert])
@pytest.mark.parametrize("thing", [None, "llama"])
def test_nothing_is_asked_of_what_is_not_a_model(function, thing):
    with pytest.raises(resswap.UnsupportedModelError, match=f"{type(thing).__name__} is not"):
        function(thing)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ViTModel(ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)), "is not a decoder"),
        (
            XLNetLMHeadModel(XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=64, vocab_size=64)),
            r"XLNetLayer\.forward .*line \d+",
        ),
    ],
)
def test_not_a_decoder_or_of_a_shape_that_is_not_supported(model, message):
    before = snapshot(model)
    with pytest.raises(resswap.UnsupportedModelError, match=message):
        resswap.convert(model)
    assert_unchanged(model, before)


def test_a_model_with_a_residual_mechanism_of_its_own():
    kwargs = dict(hidden_size=64, num_hidden_layers=1, vocab_size=64, num_attention_heads=2, moe_intermediate_size=16)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**kwargs, n_routed_experts=2, num_experts_per_tok=1))
    before = snapshot(model)
    with pytest.raises(
        resswap.UnsupportedModelError, match=r"DeepseekV4DecoderLayer \(line \d+\) has a residual mechanism"
    ):
        resswap.convert(model)
    assert_unchanged(model, before)


def test_compiled_and_wrapped_models():
    model = tiny("llama")
    before = snapshot(model)
    with pytest.raises(resswap.UnsupportedModelError, match="OptimizedModule wraps .* convert the LlamaForCausalLM"):
        resswap.convert(torch.compile(model))
    with pytest.raises(resswap.UnsupportedModelError, match="DataParallel wraps"):
        resswap.convert(torch.nn.DataParallel(model))
    assert_unchanged(model, before)
    model.compile()
    with pytest.raises(resswap.UnsupportedModelError, match="is compiled: convert first"):
        resswap.convert(model)


def test_a_peft_model_is_refused_and_its_base_converts():
    base, ids = tiny("llama"), input_ids()
    peft_model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(resswap.UnsupportedModelError, match="PeftModel wraps .* convert the LlamaForCausalLM"):
        resswap.convert(peft_model)
    before = logits(peft_model, ids)
    resswap.convert(peft_model.get_base_model())
    torch.testing.assert_close(logits(peft_model, ids), before, rtol=1e-5, atol=1e-5)


def test_a_dispatched_model():
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny("llama"), input_ids()
    expected = logits(model, ids)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(resswap.UnsupportedModelError, match="remove_hook_from_module"):
        resswap.convert(model)
    assert torch.equal(logits(model, ids), expected)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    resswap.convert(model)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)


def test_a_converted_model_can_be_dispatched():
    import accelerate

    for scheme in SCHEMES:
        model, ids = resswap.convert(tiny("llama"), scheme), input_ids()
        expected = logits(model, ids)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert torch.equal(logits(model, ids), expected)


def test_a_layer_that_runs_twice():
    model = tiny("llama")
    model.model.layers[2] = model.model.layers[0]
    with pytest.raises(resswap.UnsupportedModelError, match="one layer more than once"):
        resswap.convert(model)


def test_no_layers():
    with pytest.raises(resswap.UnsupportedModelError, match="no stack of decoder layers"):
        resswap.convert(tiny("llama", num_hidden_layers=0))


def test_an_error_at_the_last_layer_leaves_nothing_behind(monkeypatch):
    """Once while the change is planned, once while it is made."""
    model, ids = tiny("llama"), input_ids()
    before, expected = snapshot(model), logits(model, ids)
    make = MHCConfig.connection

    def fails_at_the_end(self, place):
        if place.index == 5:
            raise RuntimeError("out of memory")
        return make(self, place)

    monkeypatch.setattr(MHCConfig, "connection", fails_at_the_end)
    with pytest.raises(RuntimeError, match="out of memory"):
        resswap.convert(model)
    assert_unchanged(model, before)
    monkeypatch.undo()

    add_module = torch.nn.Module.add_module

    def fails_on_the_last_layer(self, name, module):
        if self is model.model.layers[-1] and name == "mlp_connection":
            raise RuntimeError("out of memory")
        add_module(self, name, module)

    monkeypatch.setattr(torch.nn.Module, "add_module", fails_on_the_last_layer)
    with pytest.raises(RuntimeError, match="out of memory"):
        resswap.convert(model)
    monkeypatch.undo()
    assert_unchanged(model, before)
    assert torch.equal(logits(model, ids), expected)
    resswap.convert(model)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_revert(scheme):
    model, ids = tiny("llama"), input_ids()
    before, expected = snapshot(model), logits(model, ids)
    assert resswap.revert(resswap.convert(model, scheme)) is model
    assert_unchanged(model, before)
    assert torch.equal(logits(model, ids), expected)
    assert resswap.connections(model) == {}


@pytest.mark.parametrize("scheme", TRAINABLE)
def test_revert_keeps_trained_connections_unless_told(scheme):
    model = tiny("llama")
    before = snapshot(model)
    resswap.convert(model, scheme)
    randomise_connections(model)
    kept = logits(model, input_ids())
    with pytest.raises(resswap.UnsupportedModelError, match="discard_trained=True"):
        resswap.revert(model)
    assert torch.equal(logits(model, input_ids()), kept)
    resswap.revert(model, discard_trained=True)
    assert_unchanged(model, before)


def test_nothing_to_revert_or_show():
    model = tiny("llama")
    for function in (resswap.revert, resswap.diff):
        with pytest.raises(resswap.UnsupportedModelError, match="not converted"):
            function(model)


def test_two_schemes_in_one_process():
    ids = input_ids()
    models = {scheme: resswap.convert(copy.deepcopy(tiny("llama")), scheme) for scheme in SCHEMES}
    for model in models.values():
        randomise_connections(model)
    first = {scheme: logits(model, ids) for scheme, model in models.items()}
    for scheme, model in models.items():
        assert torch.equal(logits(model, ids), first[scheme])
