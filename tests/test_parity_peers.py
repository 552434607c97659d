"""The formulas of other libraries, on the same random weights. Each is skipped where it is not installed."""

import importlib.util
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch
from tiny import input_ids, logits, randomise_connections, tiny
from torch.nn import functional as F

import resswap
from resswap.ops import depth_attention
from resswap.schemes import Place

N, WIDTH, EPS = 3, 16, 1e-12


def connection(scheme, **options):
    config = resswap.available_schemes()[scheme](num_streams=N, eps=EPS, **options)
    return config.connection(Place(WIDTH, 1, 4, begins=False)).double()


def as_theirs(streams):
    """hyper-connections has the streams in the batch: `[batch * n, seq, hidden]`."""
    return streams.permute(0, 2, 1, 3).flatten(0, 1)


def randomised(module):
    for parameter in module.double().parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("tanh", [True, False])
def test_hyper_connections_hc(tanh):
    """It differs from arXiv 2409.19606 in its norm, RMSNorm instead of LayerNorm; `A_m` and `A_r` share a gate."""
    peer = pytest.importorskip("hyper_connections.hyper_connections")
    theirs = randomised(peer.HyperConnections(N, dim=WIDTH, layer_index=1, tanh=tanh))
    ours = connection("hc", tanh=tanh)
    with torch.no_grad():
        weight = 1 + theirs.norm.gamma
        dynamic = torch.cat([theirs.dynamic_alpha_fn[:, :1], theirs.dynamic_beta_fn[:, None]], 1)
        ours.fn.copy_((torch.cat([dynamic, theirs.dynamic_alpha_fn[:, 1:]], 1) * weight[:, None]).T)
        gates = theirs.dynamic_alpha_scale, theirs.dynamic_beta_scale, theirs.dynamic_alpha_scale
        ours.scale.copy_(torch.stack(gates))
        static = theirs.static_alpha
        ours.base.copy_(torch.cat([static[:, 0], theirs.static_beta, static[:, 1:].flatten()]))
    streams, y = torch.randn(2, 5, N, WIDTH).double(), torch.randn(2, 5, WIDTH).double()
    x, add = ours(streams)
    expected_x, their_add = theirs(as_theirs(streams))
    torch.testing.assert_close(x, expected_x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(as_theirs(add(y)), their_add(y), rtol=1e-9, atol=1e-9)


def test_hyper_connections_mhc():
    """It differs from arXiv 2512.24880 in that a stream's coefficients depend on that stream alone, and in Sinkhorn's
    order: its last normalisation is over the streams written, so only the limit of many rounds is the same.

    Where all streams are of one size, the paper's projection of them all can be set to do as theirs does.
    """
    peer = pytest.importorskip("hyper_connections.manifold_constrained_hyper_connections")
    theirs = randomised(peer.ManifoldConstrainedHyperConnections(N, dim=WIDTH, layer_index=1, sinkhorn_iters=300))
    ours = connection("mhc", sinkhorn_iters=300)
    with torch.no_grad():
        weight = 1 + theirs.norm.gamma
        alpha = theirs.dynamic_alpha_fn[0] * weight[:, None]  # [width, 1 + n]
        beta = theirs.dynamic_beta_fn * weight
        fn = torch.zeros(2 + N, N, N, WIDTH).double()  # pre, post and each k of comb; the stream j; what it reads
        for j in range(N):
            fn[0, j, j], fn[1, j, j] = alpha[:, 0], beta
            fn[2:, j, j] = alpha[:, 1:].T
        comb = fn[2:].transpose(0, 1)  # [j, k]
        ours.fn.copy_(torch.cat([fn[:2].flatten(0, 1), comb.flatten(0, 1)]).flatten(1))
        ours.scale.copy_(torch.cat([theirs.pre_branch_scale, theirs.h_post_scale[None], theirs.residual_scale]))
        static = theirs.static_alpha
        ours.base.copy_(torch.cat([static[:, 0], theirs.static_beta, static[:, 1:].flatten()]))
    streams = F.rms_norm(torch.randn(2, 5, N, WIDTH).double(), (WIDTH,), eps=EPS)
    y = torch.randn(2, 5, WIDTH).double()
    mixing = ours.weights(streams).mixing
    assert (mixing - mixing.mT).abs().max() > 0.05  # so that a transposed comb would show
    x, add = ours(streams)
    expected_x, their_add = theirs(as_theirs(streams))
    # Its coefficients are float32.
    torch.testing.assert_close(x, expected_x.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(as_theirs(add(y)), their_add(y).double(), rtol=1e-4, atol=1e-5)


def test_naive_attnres_of_flash_linear_attention():
    """It is the paper's formula, without resswap's factor k."""
    pytest.importorskip("einops")
    try:
        path = distribution("fla-core").locate_file("fla/ops/attnres/naive.py")
    except PackageNotFoundError:
        pytest.skip("needs flash-linear-attention: pip install --no-deps fla-core")
    spec = importlib.util.spec_from_file_location("naive_attnres", path)  # its package needs Triton
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    sources = [torch.randn(2, 5, WIDTH, requires_grad=True) for _ in range(4)]
    query, weight = torch.randn(WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
    leaves = [query, weight, *sources]
    expected = 4 * peer.naive_attnres(query, sources, weight)
    got = depth_attention(sources, query, weight, 1e-6)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def block_attn_res(blocks, partial_block, query, norm):
    """The function of arXiv 2603.15031's listing (figure 2): attention over completed blocks and the partial one."""
    values = torch.stack([*blocks, partial_block])
    scores = torch.einsum("d, n b t d -> n b t", query, norm(values))
    return torch.einsum("n b t, n b t d -> b t d", scores.softmax(0), values)


def test_the_paper_s_listing_of_block_attention_residuals():
    """A Llama run by the listing. It has no factor k, which the norms that follow take away up to their eps."""
    block_size = 4  # sublayers
    model = tiny("llama", torch.float64, num_hidden_layers=4, rms_norm_eps=1e-14)
    resswap.convert(model, "block_attnres", num_blocks=2, eps=EPS)
    randomise_connections(model)
    inner, ids = model.model, input_ids()
    length = ids.shape[1]

    def attend(blocks, partial_block, module):
        if module.query is None:  # before the first sublayer there is the embedding alone
            assert not blocks
            return partial_block
        return block_attn_res(
            blocks, partial_block, module.query, lambda v: F.rms_norm(v, (64,), module.key_weight, EPS)
        )

    with torch.no_grad():
        blocks, partial_block = [], inner.embed_tokens(ids)
        positions = inner.rotary_emb(partial_block, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf).double().triu(1)[None, None]
        for number, layer in enumerate(inner.layers):
            h = attend(blocks, partial_block, layer.attn_connection)
            if number % (block_size // 2) == 0:
                blocks.append(partial_block)
                partial_block = None
            h = layer.input_layernorm(h)
            attn_out = layer.self_attn(h, position_embeddings=positions, attention_mask=mask)[0]
            partial_block = attn_out if partial_block is None else partial_block + attn_out
            h = attend(blocks, partial_block, layer.mlp_connection)
            partial_block = partial_block + layer.mlp(layer.post_attention_layernorm(h))
        h = inner.norm(attend(blocks, partial_block, inner.stream_readout))
        expected = model.lm_head(h)
    # LlamaRMSNorm is float32 in a float64 model, where k times a number is rounded otherwise.
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)
