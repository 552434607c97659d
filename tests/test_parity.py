"""Connections give the numbers of transformers' own mHC, and of the papers' formulas in float64."""

import itertools

import pytest
import torch
from tiny import CONFIGS, input_ids, new_parameters, randomise_connections, tiny
from torch.nn import functional as F
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer, DeepseekV4HyperConnection

import resswap
from resswap.schemes import Place

HIDDEN, STREAMS = 32, 4


def deepseek_connection(hc_eps, dtype):
    config = DeepseekV4Config(hidden_size=HIDDEN, hc_mult=STREAMS, hc_eps=hc_eps, rms_norm_eps=1e-6)
    theirs = DeepseekV4HyperConnection(config).to(dtype)
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, std=(STREAMS * HIDDEN) ** -0.5 if name == "fn" else 1.0)
    config = resswap.available_schemes()["mhc"](num_streams=STREAMS, sinkhorn_iters=config.hc_sinkhorn_iters, eps=1e-6)
    ours = config.connection(Place(HIDDEN, 0, 2, begins=True)).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def deepseek_mixing(theirs, streams, branch):
    """The lines of `DeepseekV4DecoderLayer.forward` around its attention."""
    post, comb, collapsed = theirs(streams)
    y = branch(collapsed)
    return post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams), comb


# DeepSeek adds hc_eps to pre and in Sinkhorn; the formula has none.
@pytest.mark.parametrize(("hc_eps", "tolerance"), [(0.0, 1e-6), (1e-6, 2e-5)])
def test_mhc_equals_deepseek_v4(hc_eps, tolerance):
    theirs, ours = deepseek_connection(hc_eps, torch.float32)
    streams = torch.randn(2, 5, STREAMS, HIDDEN)
    weight = torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5

    def branch(x):
        return torch.tanh(x @ weight)

    expected, comb = deepseek_mixing(theirs, streams, branch)
    assert (comb - comb.transpose(-1, -2)).abs().max() > 0.1  # so that a transposed comb would show
    x, add = ours(streams)
    torch.testing.assert_close(x, theirs(streams)[2], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(add(branch(x)), expected, rtol=tolerance, atol=10 * tolerance)


def test_mhc_gradients_equal_deepseek_v4():
    theirs, ours = deepseek_connection(0.0, torch.float32)
    streams = torch.randn(2, 5, STREAMS, HIDDEN)
    upstream = torch.randn_like(streams)
    (deepseek_mixing(theirs, streams, torch.tanh)[0] * upstream).sum().backward()
    x, add = ours(streams)
    (add(torch.tanh(x)) * upstream).sum().backward()
    for name, parameter in ours.named_parameters():
        expected = theirs.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_a_converted_layer_mixes_as_deepseek_v4s_layer():
    """Both layers with their attention and MLP replaced by the same functions."""
    kwargs = dict(hidden_size=64, hc_mult=STREAMS, hc_eps=0.0, rms_norm_eps=1e-6, num_hidden_layers=1, vocab_size=64)
    kwargs |= dict(num_attention_heads=2, moe_intermediate_size=16, n_routed_experts=2, num_experts_per_tok=1)
    theirs = DeepseekV4DecoderLayer(DeepseekV4Config(**kwargs), 0)
    for connection in (theirs.attn_hc, theirs.ffn_hc):
        for parameter in connection.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    ours = resswap.convert(tiny("llama")).model.layers[0]
    ours.attn_connection.load_state_dict(theirs.attn_hc.state_dict())
    ours.mlp_connection.load_state_dict(theirs.ffn_hc.state_dict())

    class Attention(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return torch.tanh(hidden_states), None

    class MLP(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return torch.sin(2 * hidden_states)

    for layer in (ours, theirs):
        layer.self_attn, layer.mlp = Attention(), MLP()
    streams = torch.randn(2, 5, STREAMS, 64)
    torch.testing.assert_close(ours(streams), theirs(streams), rtol=1e-5, atol=1e-5)


def depth_attention(sources, query, key_weight, eps=1e-6):
    """AttnRes, arXiv 2603.15031: softmax over depth of query · RMSNorm(source), times the number of sources."""
    values = torch.stack(sources)
    keys = values / (values.pow(2).mean(-1, keepdim=True) + eps).sqrt() * key_weight
    weights = torch.einsum("c,k...c->k...", query, keys).softmax(0)
    return len(sources) * torch.einsum("k...,k...c->...c", weights, values)


@pytest.mark.parametrize("num_blocks", [None, 1, 2, 3, 4, 6])
def test_attention_residuals_equal_the_formula(num_blocks):
    """The whole stack of a converted Llama against a loop that keeps lists of sources by the paper's definition."""
    scheme, options = ("attnres", {}) if num_blocks is None else ("block_attnres", {"num_blocks": num_blocks})
    model = resswap.convert(tiny("llama", torch.float64), scheme, **options)
    randomise_connections(model)
    branch_inputs, outputs, ids = [], [], input_ids()
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda _, args: branch_inputs.append(args[0]))
        layer.self_attn.register_forward_hook(lambda _, args, output: outputs.append(output[0]))
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: branch_inputs.append(args[0]))
        layer.mlp.register_forward_hook(lambda _, args, output: outputs.append(output))
    model.model.norm.register_forward_pre_hook(lambda _, args: branch_inputs.append(args[0]))
    with torch.no_grad():
        model(ids)
    size = 6 // (num_blocks or 6)  # sublayers in a block
    readers = [*resswap.connections(model).values(), model.model.stream_readout]
    assert len(outputs) == 6 and len(branch_inputs) == len(readers) == 7
    embedding = model.model.embed_tokens(ids)
    for index, (reader, actual) in enumerate(zip(readers, branch_inputs, strict=True)):
        done = outputs[:index]
        # 6 sublayers do not divide by 4; those blocks are 2, 1, 2 and 1 long.
        bounds = [0, 2, 3, 5, 6] if num_blocks == 4 else range(0, 7, size)
        blocks = [sum(done[a:b]) for a, b in itertools.pairwise(bounds) if a < len(done)]
        expected = depth_attention([embedding, *blocks], reader.query, reader.key_weight) if index else embedding
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tanh", [True, False])
def test_dynamic_hyper_connections_equal_the_paper(tanh):
    """arXiv 2409.19606, eq. 10 to 14, in its matrix form: H' = B^T y + A_r^T H, x = A_m^T H."""
    config = resswap.available_schemes()["hc"](num_streams=3, tanh=tanh)
    connection = config.connection(Place(HIDDEN, 1, 4, begins=False)).double()
    for parameter in connection.parameters():
        torch.nn.init.normal_(parameter)
    streams, y = torch.randn(3, HIDDEN).double(), torch.randn(HIDDEN).double()
    bound = torch.tanh if tanh else lambda value: value
    normed = F.rms_norm(streams, (HIDDEN,), eps=config.eps)
    s_pre, s_post, s_comb = connection.scale
    base = connection.base
    pre = s_pre * bound(normed @ connection.fn[0]) + base[:3]
    post = s_post * bound(normed @ connection.fn[1]) + base[3:6]
    comb = s_comb * bound(normed @ connection.fn[2:].T) + base[6:].view(3, 3)
    x, add = connection(streams[None, None])
    torch.testing.assert_close(x[0, 0], pre @ streams)
    torch.testing.assert_close(add(y[None, None])[0, 0], comb.T @ streams + post[:, None] * y)


def test_every_family_of_the_tests_gets_two_connections_a_layer():
    for family in CONFIGS:
        model = resswap.convert(tiny(family))
        assert [c.index for c in resswap.connections(model).values()] == list(range(6))
        assert len(new_parameters(model)) == 18
