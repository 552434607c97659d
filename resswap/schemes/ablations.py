"""The ablations: no shortcut at all, and a norm on the residual path. Both are for training from scratch."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from resswap.ops.precision import no_autocast, wide

from .base import Add, Connection, Place, SchemeConfig, option, register_scheme


@register_scheme
@dataclass(frozen=True)
class NoneConfig(SchemeConfig):
    """Options of the scheme `none`: no shortcut, so the add gives just the branch's output.

    The ablation that residual networks were argued for with (He et al. 2015, arXiv 1512.03385, section 4.1).
    """

    scheme: ClassVar[str] = "none"
    preserves_function: ClassVar[bool] = False

    def connection(self, place: Place) -> Connection:
        return NoShortcut(place.index)


class NoShortcut(Connection):
    """The branch reads the hidden states, and its output takes their place."""

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        return streams, Add(streams, _replace)


def _replace(streams: Tensor, y: Tensor) -> Tensor:
    return y.to(streams.dtype)


@register_scheme
@dataclass(frozen=True)
class PostNormConfig(SchemeConfig):
    """Options of the scheme `post_norm`: the stream is normalised after each add, `h' = LayerNorm(h + y)`.

    "Add & Norm" of Vaswani et al. 2017 (arXiv 1706.03762, section 3.1). Norms that the model has of its own stay: a
    pre-norm model's branches normalise what they read once more.
    """

    scheme: ClassVar[str] = "post_norm"
    preserves_function: ClassVar[bool] = False

    eps: float = option(1e-5, "Added to the variance before its root.", "a number above 0", lambda e: e > 0)

    def connection(self, place: Place) -> Connection:
        return PostNorm(place, self.eps)


class PostNorm(Connection):
    """The branch reads the hidden states `h`; the add gives `LayerNorm(h + y)`, its arithmetic in float32.

    Attributes:
        weight, bias: `[hidden]`, of the LayerNorm.
    """

    def __init__(self, place: Place, eps: float) -> None:
        super().__init__(place.index)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(place.hidden_size))
        self.bias = nn.Parameter(torch.zeros(place.hidden_size))

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        return streams, Add(streams, partial(_add_and_norm, weight=self.weight, bias=self.bias, eps=self.eps))


def _add_and_norm(streams: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    with no_autocast(streams):
        total = streams + y.to(streams.dtype)
        if weight.dtype == total.dtype:  # whose kernel is as accurate, and makes no wide copy
            return F.layer_norm(total, weight.shape, weight, bias, eps)
        dtype = wide(total.dtype)
        return F.layer_norm(total.to(dtype), weight.shape, weight.to(dtype), bias.to(dtype), eps).to(total.dtype)
