"""A converted model with every new parameter drawn at random behaves like any decoder."""

import pytest
import torch
from tiny import PAIRS, SOURCES, TRAINABLE, input_ids, logits, new_parameters, randomise_connections, tiny

import resswap


def converted(family, scheme, **options):
    model = resswap.convert(tiny(family), scheme, **options)
    plain = logits(model, input_ids())
    randomise_connections(model)
    assert (logits(model, input_ids()) - plain).abs().max() > 0.01  # the parameters matter
    return model


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_cached_generation_equals_uncached(family, scheme):
    model, ids = converted(family, scheme), input_ids(2, 7)
    cached, uncached = (
        model.generate(ids, max_new_tokens=16, do_sample=False, use_cache=use_cache, output_logits=True,
                       return_dict_in_generate=True)
        for use_cache in (True, False)
    )  # fmt: skip
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(uncached.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_a_batch_equals_its_rows(family, scheme):
    model, ids = converted(family, scheme), input_ids(3)
    rows = torch.cat([logits(model, row[None]) for row in ids])
    torch.testing.assert_close(logits(model, ids), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_a_later_token_changes_no_earlier_logit(family, scheme):
    model, ids = converted(family, scheme), input_ids()
    changed = ids.clone()
    changed[:, 10:] = (ids[:, 10:] + 1) % 100 + 3
    difference = (logits(model, ids) - logits(model, changed)).abs()
    assert difference[:, :10].max() < 1e-4 < difference[:, 10:].max()


@pytest.mark.parametrize(("family", "scheme"), [*PAIRS, ("llama", "static hc"), ("gpt2", "static hc")])
def test_gradients_reach_every_new_parameter(family, scheme):
    options = {"dynamic": False} if scheme == "static hc" else {}
    model, ids = converted(family, scheme.removeprefix("static "), **options), input_ids()
    model(ids, labels=ids).loss.backward()
    new = new_parameters(model)
    assert new
    for name, parameter in new.items():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_gradient_checkpointing_gives_the_same_gradients(family, scheme):
    model, ids = converted(family, scheme).train(), input_ids()

    def gradients():
        model.zero_grad()
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recomputed = []
    hook = model.get_decoder().register_forward_pre_hook(lambda *_: None)
    connection = next(iter(resswap.connections(model).values()))
    counting = connection.register_forward_hook(lambda *_: recomputed.append(1))
    checkpointed = gradients()
    hook.remove(), counting.remove()
    assert len(recomputed) == 2  # once forward, once in the backward pass
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", TRAINABLE)
def test_reentrant_checkpointing_works_or_is_refused(scheme):
    model, ids = converted("llama", scheme).train(), input_ids()
    model(ids, labels=ids).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if scheme in SOURCES:
        with pytest.raises(resswap.UnsupportedModelError, match="use_reentrant"):
            model(ids, labels=ids)
    else:
        model(ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-4, atol=1e-6)
