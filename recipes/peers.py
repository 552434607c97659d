"""Other implementations of the same ideas, as schemes, to be measured in the same model by the same surgery.

Their modules run as their authors wrote them; only their parameters start at random where they would not be exact.
"""

import importlib.util
import itertools
import os
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

import resswap
from resswap import Add, Connection, Place, ResidualModule, SchemeConfig

PEERS = ("peer_deepseek_v4", "peer_stacked_attnres", "peer_hyper_connections")
PEERS += ("peer_liger_mhc", "peer_liger_attnres", "peer_fla_attnres")


def register_peers() -> None:
    """Make the peers known to `resswap.convert`; those whose package is not installed are left out.

    Those of Liger and flash-linear-attention are Triton kernels: they need CUDA, or Triton's interpreter.
    """
    has_triton = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    classes = {
        "hyper_connections": (HyperConnectionsPeer,),
        "liger_kernel": (LigerMHCPeer, LigerAttnResPeer) if has_triton else (),
        "fla": (FlaAttnResPeer,) if has_triton else (),
    }
    installed = [peers for package, peers in classes.items() if importlib.util.find_spec(package)]
    for config_class in (DeepseekV4Peer, StackedAttnResPeer, *itertools.chain(*installed)):
        resswap.register_scheme(config_class)


class _Expand(ResidualModule):
    def __init__(self, num_streams: int) -> None:
        super().__init__()
        self.num_streams = num_streams

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.unsqueeze(2).expand(-1, -1, self.num_streams, -1).contiguous()


class _Mean(ResidualModule):
    def forward(self, streams: Tensor) -> Tensor:
        return streams.mean(2)


@dataclass(frozen=True)
class DeepseekV4Peer(SchemeConfig):
    """mHC as in transformers' DeepSeek-V4."""

    scheme: ClassVar[str] = "peer_deepseek_v4"

    def expand(self, hidden_size: int) -> ResidualModule:
        return _Expand(4)

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        return _Mean()

    def connection(self, place: Place) -> Connection:
        return _DeepseekV4(place)


class _DeepseekV4(Connection):
    def __init__(self, place: Place) -> None:
        super().__init__(place.index)
        self.module = DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=place.hidden_size, hc_mult=4))
        for parameter in self.module.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        post, comb, x = self.module(streams)
        return x.to(streams.dtype), Add(streams, partial(_deepseek_write, post=post, comb=comb))


def _deepseek_write(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    # As DeepseekV4DecoderLayer.forward has it.
    dtype = streams.dtype
    return post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.to(dtype).transpose(-1, -2), streams)


@dataclass(frozen=True)
class StackedAttnResPeer(SchemeConfig):
    """Attention residuals over blocks as in the listing of arXiv 2603.15031: stack, norm, two einsums."""

    scheme: ClassVar[str] = "peer_stacked_attnres"

    num_blocks: int = resswap.option(8, "How many blocks; 0: every sublayer's output is a source.", "from 0")

    def connection(self, place: Place) -> Connection:
        return _StackedAttnRes(place, self.num_blocks, self.readout(place.hidden_size, 0))

    def expand(self, hidden_size: int) -> ResidualModule:
        return _FirstSource()

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        return _StackedReadout(hidden_size)


@dataclass(frozen=True)
class LigerAttnResPeer(StackedAttnResPeer):
    """The same with Liger's kernel, which takes the stack."""

    scheme: ClassVar[str] = "peer_liger_attnres"

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        return _LigerReadout(hidden_size)


@dataclass(frozen=True)
class FlaAttnResPeer(StackedAttnResPeer):
    """The same with the fused kernel of flash-linear-attention, which takes the sources."""

    scheme: ClassVar[str] = "peer_fla_attnres"

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        return _FlaReadout(hidden_size)


class _FirstSource(ResidualModule):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return (hidden_states,)


class _StackedReadout(ResidualModule):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(hidden_size))
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)

    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        values = torch.stack(sources)
        logits = torch.einsum("d,nbtd->nbt", self.query, self.norm(values))
        return torch.einsum("nbt,nbtd->btd", logits.softmax(0), values)


class _LigerReadout(_StackedReadout):
    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        from liger_kernel.transformers.functional import liger_attn_res

        return liger_attn_res(torch.stack(sources), self.query, self.norm.weight)


class _FlaReadout(_StackedReadout):
    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        from fla.ops.attnres import fused_attnres

        return fused_attnres(self.query, sources, self.norm.weight)


class _StackedAttnRes(Connection):
    def __init__(self, place: Place, num_blocks: int, read: ResidualModule) -> None:
        super().__init__(place.index)
        blocks = min(num_blocks, place.num_connections) or place.num_connections
        block, before = ((place.index - i) * blocks // place.num_connections for i in (0, 1))
        self.begins_block = block > before
        self.read = read

    def forward(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
        return self.read(sources), Add(sources, _append if self.begins_block else _accumulate)


def _append(sources: tuple[Tensor, ...], y: Tensor) -> tuple[Tensor, ...]:
    return (*sources, y)


def _accumulate(sources: tuple[Tensor, ...], y: Tensor) -> tuple[Tensor, ...]:
    return (*sources[:-1], sources[-1] + y)


@dataclass(frozen=True)
class HyperConnectionsPeer(SchemeConfig):
    """mHC as in the PyPI package hyper-connections."""

    scheme: ClassVar[str] = "peer_hyper_connections"

    def expand(self, hidden_size: int) -> ResidualModule:
        return _Expand(4)

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        return _Mean()

    def connection(self, place: Place) -> Connection:
        return _HyperConnections(place)


class _HyperConnections(Connection):
    def __init__(self, place: Place) -> None:
        super().__init__(place.index)
        from hyper_connections.manifold_constrained_hyper_connections import ManifoldConstrainedHyperConnections

        self.module = ManifoldConstrainedHyperConnections(4, dim=place.hidden_size, layer_index=place.index)

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        # The package keeps the streams in the batch.
        batch, seq, n, hidden = streams.shape
        x, add = self.module(streams.transpose(1, 2).reshape(batch * n, seq, hidden))
        return x, Add(streams, partial(_package_write, add=add, shape=(batch, n, seq, hidden)))


def _package_write(streams: Tensor, y: Tensor, add: Any, shape: tuple[int, ...]) -> Tensor:
    return add(y).view(shape).transpose(1, 2)


@dataclass(frozen=True)
class LigerMHCPeer(SchemeConfig):
    """mHC with Liger's kernels."""

    scheme: ClassVar[str] = "peer_liger_mhc"

    def expand(self, hidden_size: int) -> ResidualModule:
        return _Expand(4)

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        return _Mean()

    def connection(self, place: Place) -> Connection:
        return _LigerMHC(place)


class _LigerMHC(Connection):
    def __init__(self, place: Place) -> None:
        super().__init__(place.index)
        self.phi = nn.Parameter(0.02 * torch.randn(4 * place.hidden_size, 24))
        self.base = nn.Parameter(torch.zeros(24))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_post_res, liger_mhc_pre

        pre, post, res = liger_mhc_coeffs(streams, self.phi, self.base, *self.scale, allow_fp32=True)
        return liger_mhc_pre(streams, pre), Add(streams, partial(liger_mhc_post_res, h_post=post, h_res=res))
