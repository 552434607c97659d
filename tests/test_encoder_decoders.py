"""Encoder-decoders: the decoder alone, or both towers with streams of their own."""

import copy

import pytest
import test_all_types
import torch
from test_refusals import assert_unchanged, snapshot
from tiny import EXACT, load_by_own_code, new_parameters, randomise_connections, tiny
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    T5Model,
)

import resswap
from resswap.diagnostics import health

_TOKENS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
_BART = {**_TOKENS, **_HEADS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
_BART |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
_T5 = {**_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
_EXPERTS = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 64}
CONFIGS = {
    "bart": _BART,  # post-norm
    "marian": _BART,
    "whisper": {**_BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64},
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "longt5": _T5,
    "switch_transformers": {**_T5, **_EXPERTS},
}


def build(model_type):
    """A model in evaluation mode whose logits exceed 1, without dropout, and inputs of unequal lengths for it."""
    torch.manual_seed(0)
    auto_class = AutoModelForSpeechSeq2Seq if model_type == "whisper" else AutoModelForSeq2SeqLM
    model = auto_class.from_config(CONFIG_MAPPING[model_type](**CONFIGS[model_type])).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:  # not sinusoids, which are not saved
            nn.init.normal_(parameter, std=0.3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if hasattr(model.config, "dropout"):
        for module in model.modules():
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
    decoder_ids = torch.randint(3, 128, (2, 7))
    if model_type == "whisper":
        return model, {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": decoder_ids}
    return model, {"input_ids": torch.randint(3, 128, (2, 12)), "decoder_input_ids": decoder_ids}


@torch.no_grad()
def run(model, inputs):
    return model(**inputs, use_cache=False, output_hidden_states=True)


@torch.no_grad()
def greedy(model, inputs, use_cache=True):
    """The logits of six greedy steps."""
    inputs = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    options = dict(max_new_tokens=6, do_sample=False, use_cache=use_cache)
    output = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    return torch.stack(output.logits)


def towers_with_connections(model):
    """The towers of connections, in the order of `resswap.connections`."""
    names = resswap.connections(model)
    return list(dict.fromkeys(next(part for part in name.split(".") if part.endswith("coder")) for name in names))


def assert_close(actual, expected):
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("model_type", CONFIGS)
def test_converts_exactly_and_reverts(model_type):
    model, inputs = build(model_type)
    before = snapshot(model)
    expected, steps = run(model, inputs), greedy(model, inputs)
    assert expected.logits.abs().max() > 1
    for scheme, towers in [("mhc", "decoder"), ("hc", "all"), ("attnres", "all")]:
        resswap.convert(model, scheme, towers=towers)
        assert towers_with_connections(model) == (["encoder", "decoder"] if towers == "all" else ["decoder"])
        actual = run(model, inputs)
        assert_close(actual.logits, expected.logits)
        for kind in ("encoder_hidden_states", "decoder_hidden_states"):
            for ours, theirs in zip(actual[kind], expected[kind], strict=True):
                assert_close(ours, theirs)
        assert torch.equal(greedy(model, inputs).argmax(-1), steps.argmax(-1))
        resswap.revert(model)
        assert_unchanged(model, before)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_both_towers_with_random_parameters(model_type, tmp_path):
    model, inputs = build(model_type)
    original_error = (greedy(model, inputs) - greedy(model, inputs, use_cache=False)).abs().max()
    resswap.convert(model, towers="all")
    randomise_connections(model, std=0.1)
    steps = greedy(model, inputs)
    assert (steps - greedy(model, inputs, use_cache=False)).abs().max() <= 10 * original_error + 1e-4 * steps.max()
    expected = run(model, inputs).logits
    model.save_pretrained(tmp_path)
    auto_class = AutoModelForSpeechSeq2Seq if model_type == "whisper" else AutoModelForSeq2SeqLM
    for loaded in (auto_class.from_pretrained(tmp_path).eval(), load_by_own_code(tmp_path, auto_class.__name__)):
        assert loaded.config.residual["towers"] == "all"
        assert torch.equal(run(loaded, inputs).logits, expected)
    model.train()
    plain = gradients(model, inputs)
    assert set(plain) == set(new_parameters(model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, gradient in gradients(model, inputs).items():
        assert gradient.isfinite().all() and gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, plain[name], rtol=1e-3, atol=1e-4 * plain[name].abs().max().item())


def gradients(model, inputs):
    model.zero_grad()
    torch.manual_seed(0)
    model(**inputs, use_cache=False).logits.sin().sum().backward()
    return {name: p.grad.clone() for name, p in new_parameters(model).items() if p.grad is not None}


@pytest.mark.parametrize("scheme", EXACT)
def test_the_guard_against_overflow_in_float16(scheme):
    """T5 clamps its stream where float16 has overflowed: each stream is clamped, and nothing else changes."""
    model, inputs = build("t5")
    model.half()
    with torch.no_grad():
        finite = model(**inputs).logits
        torch.testing.assert_close(resswap.convert(model, scheme)(**inputs).logits, finite, rtol=0.02, atol=0.02)
        resswap.revert(model).decoder.block[0].layer[2].DenseReluDense.wo.weight.fill_(2e4)
        block_outputs = []
        model.decoder.block[0].register_forward_hook(lambda module, args, output: block_outputs.append(output[0]))
        expected = model(**inputs).logits
        resswap.convert(model, scheme)
        actual = model(**inputs).logits
    assert block_outputs[0].abs().max() == torch.finfo(torch.float16).max - 1000
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


def test_connections_in_a_file_of_their_own(tmp_path):
    model, inputs = build("t5")
    plain = copy.deepcopy(model)
    resswap.convert(model, towers="all")
    randomise_connections(model)
    resswap.save_connections(model, tmp_path)
    resswap.load_connections(plain, tmp_path)
    assert torch.equal(run(plain, inputs).logits, run(model, inputs).logits)


def test_diagnostics_watch_the_decoder():
    model, inputs = build("t5")
    alone = health(resswap.convert(copy.deepcopy(model)), **inputs)
    assert health(resswap.convert(model, towers="all"), **inputs) == pytest.approx(alone, rel=1e-3, abs=1e-5)


def test_heads_and_base_models():
    model, inputs = build("t5")
    base = T5Model(copy.deepcopy(model.config)).eval()
    with torch.no_grad():
        before = base(**inputs).last_hidden_state
        assert_close(resswap.convert(base, towers="all")(**inputs).last_hidden_state, before)


@pytest.mark.parametrize(
    ("model_type", "stacks"),
    [
        ("llama", r"\(model\.layers\)"),
        (
            "gemma3",
            r"\(model\.vision_tower\..*, model\.language_model\.layers\)",
        ),  # an image encoder is no encoder here
    ],
)
def test_a_model_without_an_encoder_refuses_all(model_type, stacks):
    model, _ = test_all_types.build(model_type)
    before = snapshot(model)
    message = f"no encoder beside its decoder: leave `towers` out.*{stacks}"
    with pytest.raises(resswap.UnsupportedModelError, match=message):
        resswap.convert(model, towers="all")
    assert_unchanged(model, before)


@pytest.mark.parametrize("towers", ["encoder", None, ["decoder"]])
def test_there_are_two_values_of_towers(towers):
    model = tiny("llama")
    before = snapshot(model)
    with pytest.raises(resswap.OptionError, match=r"towers=.*; allowed: decoder, all\."):
        resswap.convert(model, towers=towers)
    assert_unchanged(model, before)
