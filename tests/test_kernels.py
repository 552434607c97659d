"""Ways to run the same formulas: compiled, with streams lent instead of saved, for a few tokens without gradients."""

import copy
import logging

import pytest
import torch
from tiny import input_ids, logits, new_parameters, randomise_connections, tiny

import resswap
from resswap.ops import depth_attention, kernels, mhc_read, write_streams
from resswap.ops.compiled_kernels import mhc_read_few_compiled
from resswap.ops.few_tokens import mhc_read_few

EPS, ITERS = 1e-6, 20


def chain(length=3, n=4, width=24, tokens=(2, 7), dtype=torch.float64, lend=False, kernels="eager"):
    """Connections one after the other around sine branches: (the last streams, all leaves)."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    fns = [leaf((2 + n) * n, n * width, scale=0.3) for _ in range(length)]
    streams, scale, base = leaf(*tokens, n, width), leaf(3), leaf((2 + n) * n)
    leaves = [streams, scale, base, *fns]
    for i, fn in enumerate(fns):
        x, streams, post, comb = mhc_read(streams, fn, scale, base, ITERS, EPS, kernels)
        streams = write_streams(streams, x.sin(), post, comb, lend=lend and i < length - 1, kernels=kernels)
    return streams, leaves


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_compiled_stream_kernels(dtype, tolerance):
    results = {}
    for kernels_ in ("eager", "compile"):
        streams, leaves = chain(dtype=dtype, kernels=kernels_)
        results[kernels_] = [streams, *torch.autograd.grad(streams.float().sin().sum(), leaves)]
    torch.testing.assert_close(results["compile"], results["eager"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_compiled_depth_attention(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 7, 24, generator=generator).to(dtype).requires_grad_() for _ in range(5)]
    query, weight = (torch.randn(24, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    results = {}
    for kernels_ in ("eager", "compile"):
        x = depth_attention(leaves, query, weight, EPS, kernels_)
        results[kernels_] = [x, *torch.autograd.grad(x.float().sin().sum(), [query, weight, *leaves])]
    torch.testing.assert_close(results["compile"], results["eager"], rtol=tolerance, atol=tolerance)


def test_without_a_compiler_a_warning_says_so_once(monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(kernels, "COMPILED", kernels.COMPILED.__class__(*[fail] * 9))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    kernels._can_compile.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            chosen = [kernels.kernels_for("compile", torch.device("cpu")) for _ in range(2)]
    finally:
        kernels._can_compile.cache_clear()
    assert chosen == [kernels.EAGER] * 2
    assert caplog.text.count("no C++ compiler") == 1


def test_lent_streams_change_no_gradient():
    results = []
    for lend in (False, True):
        streams, leaves = chain(lend=lend)
        first = torch.autograd.grad(streams.sin().sum(), leaves, create_graph=True)
        results.append([streams, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
        streams, leaves = chain(lend=lend)
        results[-1] += torch.autograd.grad(streams.sin().sum(), leaves)
    for lent, kept in zip(*results, strict=True):  # second derivatives go up to 1e6, and cancel in sums
        torch.testing.assert_close(lent, kept, rtol=0, atol=1e-12 * max(1.0, kept.abs().max().item()))


def test_the_graph_can_be_walked_twice():
    streams, leaves = chain(lend=True)
    loss = streams.sin().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), first, rtol=0, atol=0)


def saved_bytes(model, ids):
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids, use_cache=False).loss
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return size, loss


@pytest.mark.parametrize("scheme", ["mhc", "hc"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_recompute_saves_memory_and_changes_no_gradient(scheme, checkpointing):
    ids, plain, sizes, gradients = input_ids(2, 32), tiny("llama"), [], []
    for recompute in (False, True):
        model = resswap.convert(copy.deepcopy(plain), scheme, recompute=recompute).train()
        randomise_connections(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        size, loss = saved_bytes(model, ids)
        loss.backward()
        sizes.append(size)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    if not checkpointing:
        streams = ids.numel() * 4 * 64 * 4
        assert sizes[0] - sizes[1] == 3 * streams  # one of the two connections of each of three layers


@pytest.mark.parametrize("scheme", ["mhc", "attnres"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_few_tokens_without_gradients(scheme, dtype, tolerance):
    """Decoding takes another way than training does."""
    model = resswap.convert(tiny("llama", dtype), scheme)
    randomise_connections(model)
    ids = input_ids(2, 5)
    expected = model(ids, use_cache=False).logits.detach()
    size = expected.abs().max().item()
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("size", [1, 50, 1000])
@pytest.mark.parametrize(("read_few", "n"), [(mhc_read_few, 4), (mhc_read_few, 3), (mhc_read_few_compiled, 2)])
def test_few_tokens_with_large_logits(n, size, read_few):
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64)
    fn, scale = torch.zeros((2 + n) * n, n * 8), torch.ones(3)
    base = size * (2 * torch.rand((2 + n) * n, generator=generator, dtype=torch.float64) - 1)
    expected = mhc_read(streams, fn.requires_grad_(), scale, base, ITERS, EPS)
    with torch.no_grad():
        x, *_, post, comb = read_few(streams, fn, scale, base, ITERS, EPS)
    for few, many in zip((x, post, comb), (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(few, many.detach(), rtol=1e-9, atol=1e-9)


def test_kernels_are_chosen_for_a_loaded_model(tmp_path):
    model = resswap.convert(tiny("llama"), "mhc", kernels="eager")
    assert {connection.kernels for connection in resswap.connections(model).values()} == {"eager"}
    resswap.set_kernels(model, "auto")
    assert {connection.kernels for connection in resswap.connections(model).values()} == {"auto"}
    with pytest.raises(resswap.OptionError, match="kernels='fast'; allowed: auto, eager, compile"):
        resswap.set_kernels(model, "fast")
    with pytest.raises(resswap.UnsupportedModelError, match="not converted"):
        resswap.set_kernels(tiny("llama"), "eager")
    plain = tiny("llama")
    with pytest.raises(resswap.OptionError, match="kernels=1"):
        resswap.convert(plain, kernels=1)
    assert not resswap.connections(plain)


@pytest.mark.parametrize("scheme", ["mhc", "hc", "block_attnres"])
def test_compiled_kernels_in_a_model(scheme):
    ids, plain, results = input_ids(), tiny("llama", num_hidden_layers=1), {}
    for kernels_ in ("eager", "compile"):
        model = resswap.convert(copy.deepcopy(plain), scheme, kernels=kernels_)
        randomise_connections(model)
        out = model(ids, use_cache=False).logits
        out.sin().sum().backward()
        results[kernels_] = [out.detach(), *(p.grad for p in new_parameters(model).values())]
    torch.testing.assert_close(results["compile"], results["eager"], rtol=1e-4, atol=1e-4)


def test_a_trace_holds_operations_and_no_numbers():
    n, generator = 4, torch.Generator().manual_seed(0)
    fn, scale, base = torch.randn((2 + n) * n, n * 8, generator=generator), torch.ones(3), torch.zeros((2 + n) * n)

    def read(streams):
        x = mhc_read(streams, fn, scale, base, ITERS, EPS)[0]
        return depth_attention([x, x.sin()], fn[0, :8], None, EPS)

    traced, other = (torch.randn(1, 2, n, 8, generator=generator) for _ in range(2))
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(read, traced)(other), read(other))
