"""Depth attention: a softmax over earlier residual contributions (attention residuals)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .precision import no_autocast, wide


def depth_attention_reference(
    sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, eps: float
) -> Tensor:
    """`depth_attention` in plain operations."""
    dtype = wide(sources[0].dtype)
    with no_autocast(sources[0]):
        probe = query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)
        logits = []
        for v in sources:
            v = v.to(dtype)
            logits.append((v * probe).sum(-1) * (v.square().mean(-1) + eps).rsqrt())
        weights = len(sources) * torch.stack(logits).softmax(0)
        x = sum(w[..., None] * v for w, v in zip(weights, sources, strict=True))
        return x.to(sources[0].dtype)


def depth_attention(sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, eps: float) -> Tensor:
    """`x[..., C] = k * sum_i alpha_i v_i`, `alpha = softmax_i(query . RMSNorm(v_i; key_weight))`, k = len(sources)."""
    return depth_attention_reference(sources, query, key_weight, eps)
