"""`ops.depth_attention` against a float64 formula written out here."""

import pytest
import torch

from resswap.ops import depth_attention, depth_attention_reference

EPS = 1e-5
BOTH = pytest.mark.parametrize("function", [depth_attention, depth_attention_reference])


def by_formula(sources, query, key_weight, eps):
    """The paper's listing on a stack, times the number of sources."""
    v = torch.stack([s.double() for s in sources])
    keys = v / (v.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if key_weight is not None:
        keys = keys * key_weight.double()
    alpha = torch.einsum("c,i...c->i...", query.double(), keys).softmax(0)
    return len(sources) * torch.einsum("i...,i...c->...c", alpha, v)


def inputs(k=5, shape=(2, 3), width=6, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)

    def make(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    return [make(*shape, width) for _ in range(k)], make(width), make(width)


@BOTH
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_formula(function, k, weighted):
    sources, query, key_weight = inputs(k)
    key_weight = key_weight if weighted else None
    out = function(sources, query, key_weight, EPS)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), by_formula(sources, query, key_weight, EPS), rtol=1e-5, atol=2e-6)
    sources, query = [s.double() for s in sources], query.double()
    out = function(sources, query, key_weight, EPS)
    torch.testing.assert_close(out, by_formula(sources, query, key_weight, EPS), rtol=1e-12, atol=1e-13)


@BOTH
def test_query_of_zero_gives_the_sum(function):
    sources, query, key_weight = inputs(7)
    torch.testing.assert_close(function(sources, query * 0, key_weight, EPS), sum(sources), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weighted", [True, False])
def test_gradcheck(weighted):
    sources, query, key_weight = inputs(3, shape=(2,), width=4, dtype=torch.float64, grad=True)
    weights = [key_weight] if weighted else []
    assert torch.autograd.gradcheck(
        lambda q, *rest: depth_attention(rest[:3], q, rest[3] if weighted else None, EPS), (query, *sources, *weights)
    )


def test_gradcheck_when_a_source_is_used_again():
    sources, query, key_weight = inputs(2, shape=(2,), width=4, dtype=torch.float64, grad=True)

    def twice(a, b, query, key_weight):
        x = depth_attention([a, b, a], query, key_weight, EPS)
        return depth_attention([a, b, x.tanh()], query, key_weight, EPS) * a

    assert torch.autograd.gradcheck(twice, (*sources, query, key_weight))


@pytest.mark.parametrize("frozen", [{"query"}, {"key_weight"}, {"query", "key_weight"}, {"sources"}, {"source 1"}])
def test_frozen_inputs(frozen):
    sources, query, key_weight = inputs(3, dtype=torch.float64, grad=True)
    query.requires_grad_("query" not in frozen)
    key_weight.requires_grad_("key_weight" not in frozen)
    for i, source in enumerate(sources):
        source.requires_grad_("sources" not in frozen and f"source {i}" not in frozen)
    leaves = [t for t in (query, key_weight, *sources) if t.requires_grad]
    cotangent = torch.randn(sources[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(depth_attention(sources, query, key_weight, EPS), leaves, cotangent)
    expected = torch.autograd.grad(by_formula(sources, query, key_weight, EPS), leaves, cotangent)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_low_precision_is_rounded_once(dtype, parameters):
    sources, query, key_weight = inputs(6, width=64, grad=True)
    sources = [s.detach().to(dtype).requires_grad_() for s in sources]
    query, key_weight = (t.detach().to(parameters).requires_grad_() for t in (query, key_weight))
    out = depth_attention(sources, query, key_weight, EPS)
    assert out.dtype == dtype
    exact = by_formula(sources, query, key_weight, EPS)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-4)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaves = [query, key_weight, *sources]
    got = torch.autograd.grad(out, leaves, cotangent)
    expected = torch.autograd.grad(exact, leaves, cotangent.double())
    for g, e, leaf in zip(got, expected, leaves, strict=True):
        assert g.dtype == leaf.dtype and g.shape == leaf.shape
        torch.testing.assert_close(g, e, rtol=2 * torch.finfo(g.dtype).eps, atol=1e-3)


def test_autocast_changes_nothing():
    sources, query, key_weight = inputs(4, grad=True)
    leaves = [query, key_weight, *sources]
    expected = depth_attention(sources, query, key_weight, EPS)
    expected_grads = torch.autograd.grad(expected.sum(), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = depth_attention(sources, query, key_weight, EPS)
        grads = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close((out, grads), (expected, expected_grads), rtol=0, atol=0)


def test_layouts_and_sizes():
    sources, query, key_weight = inputs(3, shape=(4, 3), grad=True)
    expected = depth_attention(sources, query, key_weight, EPS)
    swapped = depth_attention([s.transpose(0, 1) for s in sources], query, key_weight, EPS)
    torch.testing.assert_close(swapped.transpose(0, 1), expected)
    torch.testing.assert_close(
        torch.autograd.grad(swapped.sum(), sources), torch.autograd.grad(expected.sum(), sources)
    )
    torch.testing.assert_close(depth_attention([s[0, 0] for s in sources], query, key_weight, EPS), expected[0, 0])
    empty = [s[:0] for s in sources]
    depth_attention(empty, query, key_weight, EPS).sum().backward()
    assert (query.grad == 0).all()


def test_many_tokens_go_through_in_spans(monkeypatch):
    sources, query, key_weight = inputs(3, shape=(11,), grad=True)
    leaves = [query, key_weight, *sources]
    expected = depth_attention(sources, query, key_weight, EPS)
    expected_grads = torch.autograd.grad(expected.square().sum(), leaves)
    monkeypatch.setattr("resswap.ops.spans.CPU_SPAN", 6)
    out = depth_attention(sources, query, key_weight, EPS)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), leaves), expected_grads)


def test_only_the_sources_are_saved():
    sources, query, key_weight = inputs(4, shape=(8, 16), width=128, grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        depth_attention(sources, query, key_weight, EPS)
    known = {s.data_ptr() for s in sources}
    assert sum(t.numel() for t in saved if t.data_ptr() not in known) <= 2 * 4 * 8 * 16 + 2 * 128
    with torch.no_grad():
        assert depth_attention(sources, query, key_weight, EPS).grad_fn is None


def test_compiles_and_trains_in_one_graph():
    sources, query, key_weight = inputs(4, grad=True)
    leaves = [query, key_weight, *sources]
    expected = depth_attention(sources, query, key_weight, EPS)
    out = torch.compile(depth_attention, fullgraph=True, backend="aot_eager")(sources, query, key_weight, EPS)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    expected_grads = torch.autograd.grad(expected.square().sum(), leaves)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-4)


def test_gradient_checkpointing():
    sources, query, key_weight = inputs(4, dtype=torch.float64, grad=True)
    leaves = [query, key_weight, *sources]
    expected = torch.autograd.grad(depth_attention(sources, query, key_weight, EPS).square().sum(), leaves)
    for reentrant in (True, False):
        out = torch.utils.checkpoint.checkpoint(
            lambda q, w, *s: depth_attention(s, q, w, EPS), *leaves, use_reentrant=reentrant
        )
        for leaf in leaves:
            leaf.grad = None
        out.square().sum().backward()
        torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), expected)
