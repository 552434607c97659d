"""Every option does what it says, and the whole stacks of the newer schemes equal loops written from the papers."""

import itertools

import pytest
import torch
from tiny import input_ids, logits, new_parameters, randomise_connections, tiny
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead

import resswap
from resswap.schemes.streams import LearnedReadout

HIDDEN = 64


def spy(model):
    """Runs a converted Llama; gives what each branch and the final norm read, and what each branch gave."""
    reads, outputs = [], []
    hooks = []
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            hooks.append(norm.register_forward_pre_hook(lambda _, args: reads.append(args[0])))
        hooks.append(layer.self_attn.register_forward_hook(lambda _, args, output: outputs.append(output[0])))
        hooks.append(layer.mlp.register_forward_hook(lambda _, args, output: outputs.append(output)))
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, args: reads.append(args[0])))
    with torch.no_grad():
        model(input_ids())
        embedding = model.model.embed_tokens(input_ids())
    for hook in hooks:
        hook.remove()
    return embedding, reads, outputs


def converted(scheme, layers=3, **options):
    model = resswap.convert(tiny("llama", torch.float64, num_hidden_layers=layers), scheme, **options)
    randomise_connections(model)
    return model, [*resswap.connections(model).values(), model.model.stream_readout]


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, range(7)),
        ({"key_norm_weight": False}, range(7)),
        ({"num_blocks": 2}, [0, 3, 6]),
        ({"num_blocks": 1}, [0, 6]),
        ({"block_starts": [1, 5]}, [0, 1, 5, 6]),
    ],
    ids=str,
)
def test_delta_attention_residuals_equal_a_loop(options, bounds):
    model, readers = converted("delta_attnres", **options)
    embedding, reads, outputs = spy(model)
    for index, reader in enumerate(readers):
        done = outputs[:index]
        expected = embedding + sum(done)
        deltas = [sum(done[a:b]) for a, b in itertools.pairwise(bounds) if a < len(done)]
        if deltas:
            values = torch.stack(deltas)
            query = torch.zeros(HIDDEN).double() if reader.query is None else reader.query
            keys = F.rms_norm(values, (HIDDEN,), reader.key_weight, 1e-6)
            alpha = torch.einsum("c,k...c->k...", query, keys).softmax(0)
            expected = expected + reader.gate * torch.einsum("k...,k...c->...c", alpha, values)
        torch.testing.assert_close(reads[index], expected, rtol=1e-9, atol=1e-9)
        assert (reader.query is None) == (len(deltas) < 2)
        assert reader.key_weight is None or options.get("key_norm_weight", True)


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (1, 2), (3, 2), (4, 4)])
def test_denseformer_equals_a_loop(dilation, period):
    """arXiv 2402.02622: after every `period`-th block i, Y_i = sum of alpha_ij X_j over the j that dilation leaves."""
    model, readers = converted("denseformer", layers=4, dilation=dilation, period=period)
    embedding, reads, outputs = spy(model)
    x, y = [embedding], embedding
    for block in range(1, 5):
        opening = readers[2 * block - 2]
        torch.testing.assert_close(reads[2 * block - 2], y, rtol=1e-9, atol=1e-9)
        assert (opening.alpha is None) == (block == 1 or (block - 1) % period != 0)
        attended = y + outputs[2 * block - 2]
        torch.testing.assert_close(reads[2 * block - 1], attended, rtol=1e-9, atol=1e-9)
        assert not list(readers[2 * block - 1].parameters())
        x.append(attended + outputs[2 * block - 1])
        closing = readers[2 * block] if block < 4 else readers[-1]
        if block % period == 0:
            kept = [j for j in range(block + 1) if (block - j) % dilation == 0]
            assert len(closing.alpha) == len(kept)
            y = sum(alpha * x[j] for alpha, j in zip(closing.alpha, kept, strict=True))
        else:
            y = x[-1]
    torch.testing.assert_close(reads[-1], y, rtol=1e-9, atol=1e-9)


def test_ablations_equal_a_loop():
    model, _ = converted("none")
    embedding, reads, outputs = spy(model)
    for read, expected in zip(reads, [embedding, *outputs], strict=True):
        assert torch.equal(read, expected)
    model, readers = converted("post_norm")
    embedding, reads, outputs = spy(model)
    stream = embedding
    for index, output in enumerate(outputs):
        assert torch.equal(reads[index], stream)
        weight, bias = readers[index].weight, readers[index].bias
        total = stream + output
        normed = (total - total.mean(-1, keepdim=True)) / (total.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        stream = reads[index + 1]
        torch.testing.assert_close(stream, normed * weight + bias, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scheme", resswap.available_schemes())
def test_hidden_states_keep_their_dtype(scheme, dtype, autocast):
    model, ids = resswap.convert(tiny(dtype=dtype), scheme), input_ids()
    randomise_connections(model, std=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert {state.dtype for state in states} == {dtype} and all(state.isfinite().all() for state in states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_learned_readout_is_deepseek_v4s(dtype):
    theirs = DeepseekV4HyperHead(DeepseekV4Config(hidden_size=16, hc_mult=4, hc_eps=0.0, rms_norm_eps=1e-6)).to(dtype)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = LearnedReadout(4, 16, 0.01, 1e-6).to(dtype)
    ours.load_state_dict({name.removeprefix("hc_"): value for name, value in theirs.state_dict().items()})
    streams = torch.randn(2, 5, 4, 16, dtype=dtype, requires_grad=True)
    got, expected = ours(streams), theirs(streams)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(got)
    (ours_grad,), (their_grad,) = (torch.autograd.grad(out, [streams], upstream) for out in (got, expected))
    torch.testing.assert_close(ours_grad, their_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_learned_ends_of_mhc_are_exact_and_train(dtype):
    model, ids = tiny(dtype=dtype), input_ids()
    before = logits(model, ids)
    resswap.convert(model, "mhc", learned_readout=True, expansion_scale=True)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05}[dtype]
    assert (logits(model, ids) - before).abs().max() <= tolerance * before.abs().max()
    ends = {name: p for name, p in new_parameters(model).items() if "connection" not in name}
    assert {name.removeprefix("model.") for name in ends} == {
        "stream_expand.scale", "stream_readout.fn", "stream_readout.scale", "stream_readout.base"
    }  # fmt: skip
    old = {name: p.detach().clone() for name, p in ends.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(p, old[name]) for name, p in ends.items())


def test_ends_have_no_parameters_unless_asked_for():
    model = resswap.convert(tiny(), "mhc")
    assert all("connection" in name for name in new_parameters(model))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("connections", [0, 1, 2, 3, 0, 1]), ("layers", [0, 0, 1, 1, 2, 2]), ("first", [0] * 6)],
)
def test_pre_pattern(pattern, expected):
    model = resswap.convert(tiny(), "mhc", pre_pattern=pattern)
    weights = [connection.base[:4].detach().sigmoid() for connection in resswap.connections(model).values()]
    assert [int(w.argmax()) for w in weights] == expected
    assert all(w.max() == pytest.approx(0.7, abs=0.04) and w.sum() == pytest.approx(1, abs=1e-3) for w in weights)


@pytest.mark.parametrize("scheme", ["attnres", "block_attnres"])
def test_keys_without_a_weight(scheme):
    model = resswap.convert(tiny(), scheme, key_norm_weight=False)
    assert {name.rpartition(".")[2] for name in new_parameters(model)} == {"query"}
    other = resswap.convert(tiny(), scheme)
    other.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for (name, p), (_, q) in zip(model.named_parameters(), model.named_parameters(), strict=True):
            if name.endswith("query"):
                p.normal_()
                other.get_parameter(name).copy_(q)
    torch.testing.assert_close(logits(model, input_ids()), logits(other, input_ids()))


def test_block_starts():
    model = resswap.convert(tiny(), "block_attnres", block_starts=[1, 4])
    assert [c.new_source for c in resswap.connections(model).values()] == [True, True, False, False, True, False]
    ids = input_ids()
    seen = []
    model.model.stream_readout.register_forward_pre_hook(lambda _, args: seen.append(len(args[0].values)))
    logits(model, ids)
    assert seen == [4]  # the embedding and three blocks
    equal = resswap.convert(tiny(), "block_attnres", num_blocks=3)
    listed = resswap.convert(tiny(), "block_attnres", block_starts=(2, 4))
    pairs = zip(resswap.connections(equal).values(), resswap.connections(listed).values(), strict=True)
    assert all(a.new_source == b.new_source for a, b in pairs)


@pytest.mark.parametrize("scheme", ["block_attnres", "delta_attnres"])
def test_block_starts_are_kept_and_checked(scheme, tmp_path):
    model = resswap.convert(tiny(), scheme, block_starts=[2, 3])
    randomise_connections(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.residual == model.config.residual
    assert loaded.config.residual["options"]["block_starts"] == [2, 3]
    assert torch.equal(logits(loaded, input_ids()), logits(model, input_ids()))
    for wrong in ([3, 2], [0, 2], [1.5], [2, 2], [True], "2", 2):
        with pytest.raises(resswap.OptionError, match="block_starts=.*; allowed: ascending whole numbers from 1"):
            resswap.convert(tiny(), scheme, block_starts=wrong)
    with pytest.raises(resswap.OptionError, match=r"block_starts=\[6\]; the model has 6 connections"):
        resswap.convert(tiny(), scheme, block_starts=[6])
    with pytest.raises(resswap.OptionError, match="num_blocks=3 or block_starts, not both"):
        resswap.convert(tiny(), scheme, block_starts=[2], num_blocks=3)


@pytest.mark.parametrize("scheme", resswap.available_schemes())
def test_a_pretrained_model_is_not_thrown_away_silently(scheme, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("resswap.conversion.logger.warning", warnings.append)
    tiny().save_pretrained(tmp_path)
    resswap.convert(tiny(), scheme)
    assert not warnings
    resswap.convert(AutoModelForCausalLM.from_pretrained(tmp_path), scheme)
    if resswap.available_schemes()[scheme].preserves_function:
        assert not warnings
    else:
        assert len(warnings) == 1 and "does not preserve" in warnings[0] and str(tmp_path) in warnings[0]


def test_denseformer_without_an_average_is_refused():
    model = tiny()
    with pytest.raises(resswap.OptionError, match="period=4; the model has 3 layers"):
        resswap.convert(model, "denseformer", period=4)
    assert not resswap.connections(model)
