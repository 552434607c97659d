"""A converted model compiles as one graph and agrees with itself."""

import pytest
import torch
from tiny import input_ids, logits, new_parameters, randomise_connections, tiny

import resswap


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def converted(family, scheme, layers, dtype=torch.float32):
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    model = resswap.convert(tiny(family, dtype, **{name: layers}), scheme)
    randomise_connections(model)
    return model


@pytest.mark.parametrize(
    ("family", "scheme"),
    [*(("llama", scheme) for scheme in ("mhc", "mhc_lite", "hc", "block_attnres", "delta_attnres", "denseformer"))]
    + [("gpt2", "mhc"), ("gpt2", "attnres")],
)
def test_one_graph(family, scheme):
    """aot_eager traces as inductor does, forward and backward, without its compile time."""
    model, ids = converted(family, scheme, layers=2, dtype=torch.float64), input_ids()
    expected = model(ids, use_cache=False).logits
    expected.sin().sum().backward()
    gradients = {name: p.grad.clone() for name, p in new_parameters(model).items()}
    model.zero_grad()
    actual = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits
    actual.sin().sum().backward()
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    for name, parameter in new_parameters(model).items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("scheme", ["mhc", "attnres"])
def test_inductor(scheme):
    model, ids = converted("llama", scheme, layers=1), input_ids()
    expected = logits(model, ids)
    torch.testing.assert_close(logits(torch.compile(model, fullgraph=True), ids), expected, rtol=1e-4, atol=1e-4)


def test_compiled_generation_with_a_static_cache():
    model, ids = converted("llama", "mhc", layers=2), input_ids(2, 7)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(tokens, expected)
