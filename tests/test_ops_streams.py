"""`ops.streams` against float64 formulas written out here, and against transformers' DeepSeek-V4."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from resswap.ops import (
    hc_coefficients,
    hc_read,
    hc_read_reference,
    mhc_coefficients,
    mhc_read,
    mhc_read_reference,
    read_streams,
    read_streams_reference,
    write_streams,
    write_streams_reference,
)

EPS = 1e-5
ITERS = 6
KINDS = ["mhc", "hc", "hc-linear", "hc-static"]
FAST = SimpleNamespace(mhc=mhc_read, hc=hc_read, read=read_streams, write=write_streams)
PLAIN = SimpleNamespace(
    mhc=mhc_read_reference, hc=hc_read_reference, read=read_streams_reference, write=write_streams_reference
)


def inputs(kind, n=3, shape=(2, 3), width=5, dtype=torch.float64, grad=True, seed=0):
    """(streams, y, fn, scale, base), all random and asymmetric."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = ((n + 2) * n, n * width) if kind == "mhc" else (n + 2, width)
    sizes = [(*shape, n, width), (*shape, width), (rows, columns), (3,), ((n + 2) * n,)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in sizes]
    if kind == "hc-static":
        tensors[2] = None
        tensors[3].requires_grad_(False)
    return tensors


def leaves_of(tensors):
    return [t for t in tensors if t is not None and t.requires_grad]


def read(ops, kind, streams, fn, scale, base):
    if kind == "mhc":
        return ops.mhc(streams, fn, scale, base, ITERS, EPS)
    return ops.hc(streams, fn, scale, base, kind == "hc", EPS)


def connect(ops, kind, streams, y, fn, scale, base):
    """One connection around the branch `x -> y * tanh(x)`: (x, new streams)."""
    x, streams, post, comb = read(ops, kind, streams, fn, scale, base)
    return x, ops.write(streams, y * x.tanh(), post, comb)


def token_coefficients(kind, x, fn, scale, base):
    """The formulas for one token x `[n, C]`, entry by entry."""
    n = x.shape[0]
    base_pre, base_post, base_comb = base[:n], base[n : 2 * n], base[2 * n :].reshape(n, n)
    if kind == "hc-static":
        return base_pre, base_post, base_comb
    if kind == "mhc":
        flat = x.reshape(-1)
        m = fn @ flat / torch.sqrt((flat**2).mean() + EPS)
        pre = torch.sigmoid(scale[0] * m[:n] + base_pre)
        post = 2 * torch.sigmoid(scale[1] * m[n : 2 * n] + base_post)
        comb = torch.exp(scale[2] * m[2 * n :].reshape(n, n) + base_comb)
        for _ in range(ITERS):
            comb = comb / comb.sum(1, keepdim=True)
            comb = comb / comb.sum(0, keepdim=True)
        return pre, post, comb
    t = torch.stack([fn @ x[j] / torch.sqrt((x[j] ** 2).mean() + EPS) for j in range(n)])
    t = torch.tanh(t) if kind == "hc" else t
    pre = torch.stack([scale[0] * t[j, 0] + base_pre[j] for j in range(n)])
    post = torch.stack([scale[1] * t[j, 1] + base_post[j] for j in range(n)])
    comb = torch.stack([torch.stack([scale[2] * t[j, 2 + k] + base_comb[j, k] for k in range(n)]) for j in range(n)])
    return pre, post, comb


def connect_by_formula(kind, streams, y, fn, scale, base):
    """`connect`, token by token, in float64."""
    streams, y, scale, base = streams.double(), y.double(), scale.double(), base.double()
    fn = None if fn is None else fn.double()
    n, width = streams.shape[-2:]
    xs, news = [], []
    for token, branch in zip(streams.reshape(-1, n, width), y.reshape(-1, width), strict=True):
        pre, post, comb = token_coefficients(kind, token, fn, scale, base)
        x = sum(pre[j] * token[j] for j in range(n))
        out = branch * torch.tanh(x)
        xs.append(x)
        news.append(torch.stack([sum(comb[j, k] * token[j] for j in range(n)) + post[k] * out for k in range(n)]))
    return torch.stack(xs).reshape(y.shape), torch.stack(news).reshape(streams.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ops", [FAST, PLAIN], ids=["fast", "plain"])
@pytest.mark.parametrize("n", range(1, 9))
def test_formula(ops, kind, n):
    tensors = inputs(kind, n)
    got, expected = connect(ops, kind, *tensors), connect_by_formula(kind, *tensors)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    got = torch.autograd.grad(sum(t.sin().sum() for t in got), leaves_of(tensors))
    expected = torch.autograd.grad(sum(t.sin().sum() for t in expected), leaves_of(tensors))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_transposed_comb_is_noticed():
    streams, y, fn, scale, base = inputs("mhc")
    _, streams, post, comb = mhc_read(streams, fn, scale, base, ITERS, EPS)
    expected = torch.einsum("...jk,...jc->...kc", comb, streams) + post[..., None] * y[..., None, :]
    torch.testing.assert_close(write_streams(streams, y, post, comb), expected)
    assert not torch.allclose(write_streams(streams, y, post, comb.mT), expected, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_are_those_of_the_read(kind):
    streams, _, fn, scale, base = inputs(kind)
    if kind == "mhc":
        pre, post, comb = mhc_coefficients(streams, fn, scale, base, ITERS, EPS)
    else:
        pre, post, comb = hc_coefficients(streams, fn, scale, base, kind == "hc", EPS)
    got = read(FAST, kind, streams, fn, scale, base)
    torch.testing.assert_close(got, (read_streams(streams, pre), streams, post, comb))
    lead = () if kind == "hc-static" else (2, 3)
    assert (pre.shape, post.shape, comb.shape) == ((*lead, 3), (*lead, 3), (*lead, 3, 3))


def deepseek(hc_eps, fn_scale, n=4, width=16, iters=20):
    config = SimpleNamespace(hc_mult=n, hc_sinkhorn_iters=iters, hc_eps=hc_eps, rms_norm_eps=1e-6, hidden_size=width)
    module = DeepseekV4HyperConnection(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
        module.fn.mul_(fn_scale)
    return module


@pytest.mark.parametrize(("hc_eps", "fn_scale", "tolerance"), [(0.0, 1.0, 2e-6), (1e-6, 0.1, 1e-5)])
def test_parity_with_deepseek_v4(hc_eps, fn_scale, tolerance):
    """The connection, and the mixing in the decoder layer around it (float32).

    Their default hc_eps is added to each entry of comb, so it tells where an entry is not much larger.
    """
    theirs = deepseek(hc_eps, fn_scale)
    streams, y, *_ = inputs("mhc", n=4, width=16, dtype=torch.float32, grad=False)
    post, comb, collapsed = theirs(streams)
    written = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
    x, handed_on, our_post, our_comb = mhc_read(streams, theirs.fn, theirs.scale, theirs.base, 20, 1e-6)
    ours = (our_post, our_comb, x, write_streams(handed_on, y, our_post, our_comb))
    for got, expected in zip(ours, (post, comb, collapsed, written), strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradcheck(kind, n):
    tensors = inputs(kind, n, shape=(2,), width=3)

    def function(*leaves):
        found = iter(leaves)
        args = [next(found) if t is not None and t.requires_grad else t for t in tensors]
        return connect(FAST, kind, *args)

    assert torch.autograd.gradcheck(function, leaves_of(tensors))


def test_gradcheck_of_read_and_write():
    streams, y, *_ = inputs("mhc")
    generator = torch.Generator().manual_seed(1)
    pre, post, comb = (
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in [(3,), (3,), (3, 3)]
    )
    assert torch.autograd.gradcheck(read_streams, (streams, pre))
    assert torch.autograd.gradcheck(write_streams, (streams, y, post, comb))


REUSES = {
    "streams before": lambda s, out, w: s * w,
    "streams handed on": lambda s, out, w: out * w,
    "both": lambda s, out, w: s * out * w,
    "into a second write": lambda s, out, w: write_streams(out, w[..., 0, :], w[..., 0], w[..., :3]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reuse", REUSES)
def test_streams_used_a_second_time(kind, reuse):
    """The gradient that a read adds to in place must never be one that something else still needs."""
    tensors = inputs(kind)
    weight = inputs("mhc", seed=1)[0]

    def function(ops):
        streams, y, fn, scale, base = tensors
        x, out, post, comb = read(ops, kind, streams, fn, scale, base)
        again = REUSES[reuse](streams, out, weight)
        return ops.write(out, y * x, post, comb).sin().sum() + (again * x[..., None, :]).sum()

    leaves = [*leaves_of(tensors), weight]
    got, expected = (torch.autograd.grad(function(ops), leaves) for ops in (FAST, PLAIN))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("early", [True, False])
def test_a_gradient_shared_between_two_nodes_is_left_alone(early):
    """An add passes one and the same tensor to both of its inputs; the other input may be older than the read."""
    tensors = inputs("mhc")
    weight = inputs("mhc", seed=1)[0]

    def function(ops):
        streams, y, fn, scale, base = tensors
        shift = weight.sin() if early else None
        x, out, post, comb = read(ops, "mhc", streams, fn, scale, base)
        shift = weight.sin() if shift is None else shift
        return ops.write(out + shift, y * x, post, comb).sin().sum()

    leaves = [*leaves_of(tensors), weight]
    got, expected = (torch.autograd.grad(function(ops), leaves) for ops in (FAST, PLAIN))
    torch.testing.assert_close(got, expected)


def test_a_gradient_given_by_the_caller_is_left_alone():
    streams, _, fn, scale, base = inputs("mhc")
    x, out, *_ = mhc_read(streams, fn, scale, base, ITERS, EPS)
    grad = torch.ones_like(out)
    torch.autograd.backward([x, out], [torch.ones_like(x), grad])
    assert (grad == 1).all() and not (streams.grad == 1).all()


def test_the_usual_chain_adds_in_place(monkeypatch):
    """Streams handed from write to read to write: no copy of their gradient is made."""
    streams, y, fn, scale, base = inputs("mhc")
    x, out, post, comb = mhc_read(streams * 1, fn, scale, base, ITERS, EPS)
    loss = write_streams(out, y * x, post, comb).sum()
    monkeypatch.setattr(torch.Tensor, "clone", lambda *args, **kwargs: pytest.fail("copied"))
    torch.autograd.grad(loss, [streams])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [{0}, {1}, {2}, {3}, {4}, {0, 1}, {1, 4}, {2, 3, 4}, {0, 1, 3}])
def test_frozen_inputs(kind, trained):
    tensors = inputs(kind)
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            tensor.requires_grad_(i in trained and not (kind == "hc-static" and i == 3))
    leaves = leaves_of(tensors)
    if not leaves:
        return
    got, expected = (
        torch.autograd.grad(connect(ops, kind, *tensors)[1].sin().sum(), leaves, allow_unused=True)
        for ops in (FAST, PLAIN)
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("used", ["x", "post", "comb", "streams"])
def test_outputs_may_go_unused(used):
    tensors = inputs("mhc")
    streams, _, fn, scale, base = tensors

    def function(ops):
        outputs = dict(zip(["x", "streams", "post", "comb"], read(ops, "mhc", streams, fn, scale, base), strict=True))
        return torch.autograd.grad(outputs[used].sin().sum(), [streams, fn, scale, base], allow_unused=True)

    for got, expected in zip(function(FAST), function(PLAIN), strict=True):
        got, expected = (0 * streams.sum() if g is None else g for g in (got, expected))
        torch.testing.assert_close(got, expected.expand(got.shape))


@pytest.mark.parametrize("ops", [FAST, PLAIN], ids=["fast", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_equal_streams_stay_the_plain_residual(ops, dtype, precision):
    """All streams h, pre sums to 1, comb doubly stochastic, post 1: the read gives h and the write h + y."""
    _, _, fn, scale, _ = inputs("mhc", n=4, width=64, dtype=dtype, grad=False)
    generator = torch.Generator().manual_seed(5)
    h, y = (torch.randn(2, 9, 64, generator=generator).to(dtype) for _ in range(2))
    base = torch.cat([torch.zeros(8), torch.randn(16, generator=generator)]).to(dtype)
    pre = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    streams = h[..., None, :].expand(2, 9, 4, 64).contiguous()
    tolerance = {torch.float32: 4e-7, torch.float64: 2e-15}.get(dtype, torch.finfo(dtype).eps * 0.51)
    wide = h.double() + y.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        _, streams, post, comb = ops.mhc(streams, fn * 0, scale, base, 20, EPS)
        x, written = ops.read(streams, pre), ops.write(streams, y, post, comb)
    finally:
        torch.set_float32_matmul_precision(before)
    assert x.dtype == written.dtype == dtype
    torch.testing.assert_close(x.double(), h.double(), rtol=tolerance, atol=tolerance)
    expected = wide[..., None, :].expand(streams.shape)
    torch.testing.assert_close(written.double(), expected, rtol=tolerance, atol=1e-6 if tolerance > 1e-9 else 4e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ops", [FAST, PLAIN], ids=["fast", "plain"])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("branch", [torch.bfloat16, torch.float32])
def test_bfloat16_streams(kind, ops, parameters, branch):
    """Rounded once, whatever the dtype of parameters and branch; gradients have their tensor's dtype."""
    dtypes = [torch.bfloat16, branch, parameters, parameters, parameters]
    tensors = [
        t if t is None else t.detach().to(dtype).requires_grad_()
        for t, dtype in zip(inputs(kind, n=4, width=32), dtypes, strict=True)
    ]
    streams, y, *rest = tensors
    x, out, post, comb = read(ops, kind, streams, *rest)
    new = ops.write(out, y, post, comb)
    assert x.dtype == out.dtype == new.dtype == torch.bfloat16 and post.dtype == comb.dtype == torch.float32
    exact = [t if t is None else t.detach().double().requires_grad_() for t in tensors]
    exact_x, exact_out, exact_post, exact_comb = read(PLAIN, kind, exact[0], *exact[2:])
    exact_new = PLAIN.write(exact_out, exact[1], exact_post, exact_comb)
    torch.testing.assert_close(x.double(), exact_x, rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(new.double(), exact_new, rtol=2**-8, atol=1e-4)
    leaves, exact_leaves = leaves_of(tensors), leaves_of(exact)
    got = torch.autograd.grad(new.float().sum() + x.float().sum(), leaves, allow_unused=True)
    expected = torch.autograd.grad(exact_new.sum() + exact_x.sum(), exact_leaves, allow_unused=True)
    for g, e, leaf in zip(got, expected, leaves, strict=True):
        if g is not None:
            assert g.dtype == leaf.dtype and g.shape == leaf.shape
            torch.testing.assert_close(g.double(), e, rtol=2**-6, atol=2**-6 * e.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing(kind):
    tensors = inputs(kind, n=4, width=32, dtype=torch.float32)
    leaves = leaves_of(tensors)
    for ops in (FAST, PLAIN):
        expected = connect(ops, kind, *tensors)
        expected_grads = torch.autograd.grad(expected[1].sum(), leaves, allow_unused=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = connect(ops, kind, *tensors)
            if ops is FAST:
                grads = torch.autograd.grad(got[1].sum(), leaves, allow_unused=True)
        if ops is PLAIN:
            grads = torch.autograd.grad(got[1].sum(), leaves, allow_unused=True)
        torch.testing.assert_close((got, grads), (expected, expected_grads), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_and_sizes(kind):
    streams, y, *rest = inputs(kind, shape=(4, 3))
    x, new = connect(FAST, kind, streams, y, *rest)
    across = connect(FAST, kind, streams.transpose(0, 1), y.transpose(0, 1), *rest)
    torch.testing.assert_close(across, (x.transpose(0, 1), new.transpose(0, 1)))
    sliced = connect(FAST, kind, streams.repeat(1, 1, 1, 2)[..., :5], y.repeat(1, 1, 2)[..., :5], *rest)
    torch.testing.assert_close(sliced, (x, new))
    one = connect(FAST, kind, streams[0, 0], y[0, 0], *rest)
    torch.testing.assert_close(one, (x[0, 0], new[0, 0]))
    shared = streams[:1, :, :1].expand(4, 3, 3, 5)
    torch.testing.assert_close(
        connect(FAST, kind, shared, y, *rest), connect(FAST, kind, shared.contiguous(), y, *rest)
    )
    empty = connect(FAST, kind, streams[:0], y[:0], *rest)
    assert empty[0].shape == (0, 3, 5) and empty[1].shape == (0, 3, 3, 5)
    (empty[0].sum() + empty[1].sum()).backward()
    assert (rest[2].grad == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_go_through_in_spans(monkeypatch, kind):
    tensors = inputs(kind, shape=(11,))
    leaves = leaves_of(tensors)
    expected = connect(FAST, kind, *tensors)
    expected_grads = torch.autograd.grad(expected[1].sin().sum(), leaves, allow_unused=True)
    monkeypatch.setattr("resswap.ops.spans.CPU_SPAN", 15)
    got = connect(FAST, kind, *tensors)
    grads = torch.autograd.grad(got[1].sin().sum(), leaves, allow_unused=True)
    torch.testing.assert_close((got, grads), (expected, expected_grads))


def test_zero_streams_have_finite_gradients():
    tensors = inputs("mhc")
    with torch.no_grad():
        tensors[0].zero_()
    got, expected = (
        torch.autograd.grad(connect(ops, "mhc", *tensors)[1].sin().sum(), tensors) for ops in (FAST, PLAIN)
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_little_is_saved(kind):
    """Streams, y and a few dozen numbers per token; nothing at all without gradients."""
    streams, y, *rest = inputs(kind, n=4, shape=(4, 8), width=256, dtype=torch.float32)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        x, out, post, comb = read(FAST, kind, streams, *rest)
        write_streams(out, y, post, comb)
    known = {t.data_ptr() for t in (streams, y, *rest) if t is not None}
    assert sum(t.numel() for pointer, t in saved.items() if pointer not in known) <= 4 * 8 * 56
    with torch.no_grad():
        assert not any(t.requires_grad for t in connect(FAST, kind, streams, y, *rest))


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_and_trains_in_one_graph(kind):
    tensors = inputs(kind, dtype=torch.float32)
    leaves = leaves_of(tensors)
    compiled = torch.compile(lambda *args: connect(FAST, kind, *args), fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, lambda *args: connect(FAST, kind, *args)):
        outputs = function(*tensors)
        results.append((outputs, torch.autograd.grad(outputs[1].sin().sum(), leaves, allow_unused=True)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_extreme_logits_and_gradients_when_compiled():
    """Saturated mHC coefficients under gradients of 1e4, through inductor, against float64."""
    streams, y, fn, scale, base = inputs("mhc", n=4, shape=(16,), dtype=torch.float32)
    with torch.no_grad():
        scale.fill_(20)
    cotangent = torch.randn(streams.shape, generator=torch.Generator().manual_seed(1)) * 1e4
    exact = [t.detach().double().requires_grad_() for t in (streams, y, fn, scale, base)]
    expected = torch.autograd.grad(connect_by_formula("mhc", *exact)[1], exact, cotangent.double())
    compiled = torch.compile(lambda *args: connect(FAST, "mhc", *args), fullgraph=True)
    for function in (compiled, lambda *args: connect(FAST, "mhc", *args)):
        tensors = [streams, y, fn, scale, base]
        got = torch.autograd.grad(function(*tensors)[1], tensors, cotangent)
        for g, e in zip(got, expected, strict=True):
            assert g.isfinite().all()
            torch.testing.assert_close(g.double(), e, rtol=0, atol=1e-4 * e.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(kind, reentrant):
    tensors = inputs(kind)
    leaves = leaves_of(tensors)
    expected = torch.autograd.grad(connect(FAST, kind, *tensors)[1].sin().sum(), leaves, allow_unused=True)
    out = checkpoint(lambda *args: connect(FAST, kind, *args)[1], *tensors, use_reentrant=reentrant)
    out.sin().sum().backward()
    for leaf, grad in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad)
