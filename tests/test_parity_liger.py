"""Liger's kernels, run by Triton's interpreter on the CPU: the same numbers and gradients on the same random weights.

Liger's residual matrices are `[out, in]`, the transpose of `comb`, and its Sinkhorn ends with the normalisation over
the streams written, where ours and DeepSeek-V4's end with the one over the streams read. So the connections
are equal in the limit of many rounds only, and after 20 its matrix is our `sinkhorn` of the transposed logits.
"""

import importlib.util

import pytest
from processes import run_python

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")),
    reason="needs Liger and Triton: pip install --no-deps liger-kernel triton",
)

MHC = """
import json
from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_post_res, liger_mhc_pre
from resswap.ops import mhc_read, sinkhorn, write_streams

torch.manual_seed(0)
N, WIDTH, TOKENS, EPS = 4, 16, 5, 1e-6
streams, y = torch.randn(TOKENS, N, WIDTH), torch.randn(TOKENS, WIDTH)
fn, base, scale = 0.3 * torch.randn((2 + N) * N, N * WIDTH), torch.randn((2 + N) * N), torch.tensor([1.0, 0.7, 0.5])
leaves = [tensor.requires_grad_() for tensor in (streams, y, fn, base, scale)]
upstream = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, N, WIDTH)

def transposed(rows):
    '''The rows of fn or base with those of comb as [out, in].'''
    comb = rows[2 * N:].unflatten(0, (N, N)).transpose(0, 1).flatten(0, 1)
    return torch.cat([rows[: 2 * N], comb])

def theirs(rounds):
    phi, bias = transposed(fn).T.contiguous(), transposed(base)
    pre, post, res = liger_mhc_coeffs(streams, phi, bias, *scale, allow_fp32=True, tmax=rounds, sinkhorn_eps=0.0)
    return liger_mhc_pre(streams, pre), liger_mhc_post_res(streams, y, post, res), res

def ours(rounds):
    x, handed_on, post, comb = mhc_read(streams, fn, scale, base, rounds, EPS)
    return x, write_streams(handed_on, y, post, comb), comb

results = []
for connection in (ours, theirs):
    x, written, mixing = connection(200)
    results.append([x, written, *torch.autograd.grad((x, written), leaves, upstream)])
difference = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*results))
asymmetry = (mixing - mixing.mT).abs().max().item()

mixes = streams.flatten(1) @ fn.T * (streams.flatten(1).square().mean(-1, keepdim=True) + EPS).rsqrt()
logits = (0.5 * mixes + base)[:, 2 * N:].view(TOKENS, N, N)
rounds = (sinkhorn(logits.mT, 20) - theirs(20)[2]).abs().max().item()
print(json.dumps({"difference": difference, "asymmetry": asymmetry, "rounds": rounds}))
"""

ATTNRES = """
import json
from liger_kernel.transformers.functional import liger_attn_res
from resswap.ops import depth_attention

torch.manual_seed(0)
sources = [torch.randn(2, 5, 16, requires_grad=True) for _ in range(4)]
query, weight = torch.randn(16, requires_grad=True), torch.randn(16, requires_grad=True)
upstream, leaves, results = torch.randn(2, 5, 16), [query, weight, *sources], []
for x in (depth_attention(sources, query, weight, 1e-6), 4 * liger_attn_res(torch.stack(sources), query, weight)):
    results.append([x, *torch.autograd.grad(x, leaves, upstream)])
difference = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*results))
print(json.dumps({"difference": difference}))
"""


def test_mhc():
    found = run_python(MHC, TRITON_INTERPRET="1")
    assert found["difference"] < 1e-4
    assert found["rounds"] < 1e-6
    assert found["asymmetry"] > 0.05  # so that a transposed matrix would show


def test_attention_residuals():
    assert run_python(ATTNRES, TRITON_INTERPRET="1")["difference"] < 1e-5


PEERS = """
import copy, json
from pathlib import Path
import tiny
sys.path.insert(0, str(Path(tiny.__file__).parents[1] / "recipes"))
import peers, resswap

peers.register_peers()
plain, ids, results = tiny.tiny(), tiny.input_ids(1, 8), []
for scheme in ("peer_stacked_attnres", "peer_liger_attnres", "peer_liger_mhc"):
    model = resswap.convert(copy.deepcopy(plain), scheme)
    output = model(ids, use_cache=False).logits
    output.sin().sum().backward()
    grads = [p.grad for p in model.parameters()]
    results.append([output, *grads])
difference = max(((a - b).abs().max() / a.abs().max().clamp_min(1e-3)).item() for a, b in zip(*results[:2]))
finite = all(t is not None and t.isfinite().all().item() for t in results[2])
print(json.dumps({"difference": difference, "finite": finite}))
"""


def test_as_peers_of_the_benchmark():
    found = run_python(PEERS, TRITON_INTERPRET="1")
    assert found["difference"] < 1e-4
    assert found["finite"]
