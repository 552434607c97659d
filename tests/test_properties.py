"""What holds for any widths, depths, numbers of streams and dtypes."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EXACT, TRAINABLE, input_ids, logits, new_parameters, randomise_connections, tiny

import resswap
from resswap.ops import mhc_lite_coefficients, sinkhorn
from resswap.schemes import Place

few = settings(max_examples=12, deadline=None, derandomize=True)
seeds = st.integers(0, 10**6)
STREAMS = [
    name
    for name, options in resswap.available_schemes().items()
    if "num_streams" in {field.name for field in dataclasses.fields(options)}
]
LAYERS = {"llama": "num_hidden_layers", "gpt2": "n_layer"}


@st.composite
def schemes(draw, names=EXACT):
    """A scheme with options."""
    name = draw(st.sampled_from(names))
    options = {}
    if name in STREAMS:
        options["num_streams"] = draw(st.integers(2, 4))
    if name == "mhc":
        options["pre_pattern"] = draw(st.sampled_from(["connections", "layers", "first"]))
        options["learned_readout"], options["expansion_scale"] = draw(st.booleans()), draw(st.booleans())
    if name in ("mhc", "mhc_lite"):
        options["comb_diagonal"] = draw(st.floats(1 / options["num_streams"] + 1e-6, 0.99))
        options["pre_peak"] = draw(st.floats(0.6, 0.9))
    if name == "hc":
        options["dynamic"], options["tanh"] = draw(st.booleans()), draw(st.booleans())
    if name in ("attnres", "block_attnres", "delta_attnres"):
        options["key_norm_weight"] = draw(st.booleans())
    if name in ("block_attnres", "delta_attnres"):
        options["num_blocks"] = draw(st.integers(1, 5))
    if name == "denseformer":
        options["dilation"], options["period"] = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return name, options


@st.composite
def models(draw, dtype=torch.float32):
    """A plain model of random width and depth."""
    family, depth, heads = draw(st.sampled_from(sorted(LAYERS))), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    width = {"hidden_size": 16 * heads, "num_key_value_heads": 1} if family == "llama" else {"n_embd": 16 * heads}
    head_name = "num_attention_heads" if family == "llama" else "n_head"
    torch.manual_seed(draw(seeds))
    return tiny(family, dtype, **{LAYERS[family]: depth, head_name: heads, **width})


@few
@given(st.data(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), schemes())
def test_exact_at_conversion(data, dtype, scheme):
    model, ids = data.draw(models(dtype)), input_ids(2, 9)
    before = logits(model, ids)
    resswap.convert(model, scheme[0], **scheme[1])
    after = logits(model, ids)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert after.dtype == dtype
    assert (after - before).abs().max() <= tolerance * before.abs().max().clamp(min=1)


@few
@given(st.data(), schemes(TRAINABLE), st.integers(1, 8))
def test_no_logit_depends_on_later_tokens_or_other_rows(data, scheme, position):
    model, ids = resswap.convert(data.draw(models()), scheme[0], **scheme[1]), input_ids(2, 9)
    randomise_connections(model)
    expected = logits(model, ids)
    changed = ids.clone()
    changed[:, position:] = (ids[:, position:] + 1) % 100 + 3
    torch.testing.assert_close(logits(model, changed)[:, :position], expected[:, :position], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(model, ids[1:]), expected[1:], rtol=1e-4, atol=1e-4)


@few
@given(st.data(), schemes(TRAINABLE))
def test_every_parameter_matters(data, scheme):
    model, ids = resswap.convert(data.draw(models(torch.float64)), scheme[0], **scheme[1]), input_ids(2, 9)
    randomise_connections(model)
    model(ids, labels=ids).loss.backward()
    for name, parameter in new_parameters(model).items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, (scheme, name)


@few
@given(seeds, st.integers(2, 6), st.floats(0.1, 1.0))
def test_sinkhorn_is_doubly_stochastic(seed, n, scale):
    matrices = sinkhorn(scale * torch.randn(64, n, n, generator=torch.Generator().manual_seed(seed)), 20)
    assert matrices.min() >= 0
    torch.testing.assert_close(matrices.sum(-1), torch.ones(64, n), rtol=0, atol=4e-3)
    torch.testing.assert_close(matrices.sum(-2), torch.ones(64, n), rtol=0, atol=1e-6)


@few
@given(seeds, st.integers(2, 4), st.floats(0.1, 20.0))
def test_convex_combinations_of_permutations_are_doubly_stochastic(seed, n, scale):
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * n + [1, 1, 2, 6, 24][n]
    fn, base = (torch.randn(size, generator=generator) for size in ((rows, 5 * n), (rows,)))
    streams = torch.randn(64, n, 5, generator=generator)
    comb = mhc_lite_coefficients(streams, fn, torch.full((3,), scale), base, 1e-6)[2]
    assert comb.min() >= 0
    torch.testing.assert_close(comb.sum(-1), torch.ones(64, n), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(-2), torch.ones(64, n), rtol=0, atol=1e-6)


@few
@given(seeds, st.sampled_from(["mhc", "hc"]), st.permutations(range(4)))
def test_streams_and_parameters_permuted_alike_give_permuted_streams(seed, scheme, order):
    """No stream is special but by its parameters."""
    torch.manual_seed(seed)
    n, width = 4, 6
    connection = resswap.available_schemes()[scheme](num_streams=n).connection(Place(width, 1, 4, False)).double()
    for parameter in connection.parameters():
        torch.nn.init.normal_(parameter)
    streams, y = torch.randn(3, n, width).double(), torch.randn(3, width).double()
    x, add = connection(streams)
    before = add(y)

    def permuted(rows):
        pre, post, comb = rows[:n][order], rows[n : 2 * n][order], rows[2 * n :].unflatten(0, (n, n))
        return torch.cat([pre, post, comb[order][:, order].flatten(0, 1)])

    with torch.no_grad():
        connection.base.copy_(permuted(connection.base))
        if scheme == "mhc":
            fn = permuted(connection.fn).unflatten(1, (n, width))[:, order]
            connection.fn.copy_(fn.flatten(1))
        else:
            connection.fn.copy_(torch.cat([connection.fn[:2], connection.fn[2:][order]]))
    permuted_x, add = connection(streams[:, order])
    torch.testing.assert_close(permuted_x, x)
    torch.testing.assert_close(add(y), before[:, order])
