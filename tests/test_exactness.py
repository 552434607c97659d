"""Straight after conversion a model computes what it did before."""

import pytest
import torch
from tiny import CONFIGS, EXACT, FAMILIES, PAIRS, input_ids, logits, tiny

import resswap


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_float32_logits(family, scheme):
    model, ids = tiny(family), input_ids()
    before = logits(model, ids)
    assert before.abs().max() > 1
    assert resswap.convert(model, scheme) is model
    after = logits(model, ids)
    assert (after - before).abs().max() <= 1e-5 * before.abs().max().clamp(min=1)


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_logits(family, scheme):
    model, ids = tiny(family, torch.float64), input_ids()
    before = logits(model, ids)
    resswap.convert(model, scheme)
    after = logits(model, ids)
    assert after.dtype == torch.float64
    assert (after - before).abs().max() <= 1e-12 * before.abs().max().clamp(min=1)


@pytest.mark.parametrize(("family", "scheme"), [pair for pair in PAIRS if pair[1] in EXACT])
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_tokens(family, scheme, use_cache):
    model = tiny(family)
    ids = input_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # left padding
    ids[0, :4] = 0

    def generate():
        return model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, use_cache=use_cache)

    before = generate()
    resswap.convert(model, scheme)
    assert before.shape == (2, 25)
    assert torch.equal(generate(), before)


@pytest.mark.parametrize("scheme", EXACT)
def test_bfloat16_is_as_close_as_one_rounding(scheme):
    model, ids = tiny("llama", torch.bfloat16), input_ids()
    exact = logits(tiny("llama").to(torch.bfloat16).float(), ids)
    before = logits(model, ids)
    resswap.convert(model, scheme)
    after = logits(model, ids)
    assert after.dtype == torch.bfloat16
    assert (after - before).abs().max() <= 2 * (before - exact).abs().max()


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_hidden_states_are_those_of_the_original(family, scheme):
    model, ids = tiny(family), input_ids()
    with torch.no_grad():
        before = model(ids, output_hidden_states=True).hidden_states
        resswap.convert(model, scheme)
        after = model(ids, output_hidden_states=True)
        as_tuple = model(ids, output_hidden_states=True, return_dict=False)
    assert len(after.hidden_states) == len(before) == 4
    for old, new in zip(before, after.hidden_states, strict=True):
        assert new.shape == old.shape == (2, 16, 64)
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-4)
    assert isinstance(as_tuple, tuple)
    assert any(isinstance(part, tuple) and part[0].shape == (2, 16, 64) for part in as_tuple)


@pytest.mark.parametrize("scheme", EXACT)
def test_loss_and_gradients_of_the_original_weights(scheme):
    model, ids = tiny("llama"), input_ids()
    before = model(ids, labels=ids).loss
    before.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    resswap.convert(model, scheme)
    after = model(ids, labels=ids).loss
    after.backward()
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    parameters = dict(model.named_parameters())
    for name, gradient in gradients.items():
        torch.testing.assert_close(parameters[name].grad, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scheme", EXACT)
def test_gpt2_with_cross_attention(scheme):
    model, ids = tiny("gpt2", add_cross_attention=True), input_ids()
    encoded = torch.randn(2, 5, 64)
    alone, crossed = logits(model, ids), logits(model, ids, encoder_hidden_states=encoded)
    assert (alone - crossed).abs().max() > 0.1
    resswap.convert(model, scheme)
    sites = {name.rpartition(".")[2] for name in resswap.connections(model)}
    assert sites == {"attn_connection", "crossattention_connection", "mlp_connection"}
    torch.testing.assert_close(logits(model, ids), alone, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits(model, ids, encoder_hidden_states=encoded), crossed, rtol=1e-5, atol=1e-4)


def test_gpt2_without_cross_attention_has_no_connection_for_it():
    model = resswap.convert(tiny("gpt2"))
    assert {name.rpartition(".")[2] for name in resswap.connections(model)} == {"attn_connection", "mlp_connection"}


@pytest.mark.parametrize("scheme", EXACT)
def test_another_model_of_the_same_class_is_untouched(scheme):
    other, ids = tiny("llama"), input_ids()
    before, keys, kind = logits(other, ids), list(other.state_dict()), type(other.model.layers[0])
    resswap.convert(tiny("llama"), scheme)
    assert torch.equal(logits(other, ids), before)
    assert list(other.state_dict()) == keys and type(other.model.layers[0]) is kind
    assert not hasattr(other.config, "residual")
