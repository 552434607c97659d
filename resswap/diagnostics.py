"""What a converted model does while it runs: a few numbers per forward pass, read by hooks that leave no trace."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from resswap.conversion import connections
from resswap.errors import UnsupportedModelError
from resswap.surgery import READOUT
from resswap.training import added_parameters


class Probe:
    """Watches the forward passes of a converted model until it is closed; of several passes the last one counts.

    Use it as a context manager, or call `close`. Parameters, outputs and gradients are what they are without it.

    Raises:
        UnsupportedModelError: the model is not converted.
    """

    def __init__(self, model: nn.Module) -> None:
        found = connections(model)
        if not found:
            raise UnsupportedModelError(f"{type(model).__name__} is not converted: it has no connections to watch.")
        ends = [module for name, module in model.named_modules() if name.rpartition(".")[2] == READOUT]
        self._seen: dict[int, dict[str, Tensor]] = {}
        self._last = max(connection.index for connection in found.values()) + 1
        places = [(connection, connection.index) for connection in found.values()]
        places += [(_inner(end), self._last) for end in ends]
        self._hooks = [module.register_forward_pre_hook(self._reader(index)) for module, index in places]

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off; `values` still gives what was seen."""
        for hook in self._hooks:
            hook.remove()

    def values(self) -> dict[str, float]:
        """What the last forward pass showed; empty before the first.

        Keys, where the scheme has what they measure:
            stream_rms_first, stream_rms_last, stream_rms_max: root mean square of the streams (or sources) that the
                first connection and the read-out get, and the largest on the way.
            stream_spread: distance of the streams from their mean before the read-out, relative to their size; 0 if
                they are all alike.
            doubly_stochastic_error: how far a row or column sum of a mixing matrix is from 1, at most.
            gain_forward, gain_backward: largest row and column sum of the absolute values of the product of all
                mixing matrices, averaged over tokens; 1 if all are doubly stochastic.
            depth_entropy, depth_entropy_last: entropy of the depth attention relative to that of equal weights, mean
                over all of them and that of the read-out.
        """
        seen = [self._seen[index] for index in sorted(self._seen)]
        if not seen:
            return {}
        rms = [float(place["rms"]) for place in seen]
        values = {"stream_rms_first": rms[0], "stream_rms_last": rms[-1], "stream_rms_max": max(rms)}
        if "spread" in seen[-1]:
            values["stream_spread"] = float(seen[-1]["spread"])
        mixing = [place["mixing"] for place in seen if "mixing" in place]
        if mixing:
            sums = torch.stack([torch.stack([m.sum(-1), m.sum(-2)]).sub(1).abs().max() for m in mixing])
            values["doubly_stochastic_error"] = float(sums.max())
            product = mixing[0]
            for matrix in mixing[1:]:
                product = product @ matrix  # X'_k = sum_j comb[j, k] X_j: rows are inputs, columns are outputs
            values["gain_forward"] = float(product.abs().sum(-2).amax(-1).mean())
            values["gain_backward"] = float(product.abs().sum(-1).amax(-1).mean())
        entropies = [float(place["entropy"]) for place in seen if "entropy" in place]
        if entropies:
            values["depth_entropy"] = sum(entropies) / len(entropies)
            values["depth_entropy_last"] = entropies[-1]
        return values

    def _reader(self, index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        @torch.no_grad()
        def read(module: nn.Module, args: tuple[Any, ...]) -> None:
            streams = args[0]
            tensors = [streams] if isinstance(streams, Tensor) else list(streams.values)
            place = {"rms": torch.stack([t.float().square().mean() for t in tensors]).mean().sqrt()}
            if isinstance(streams, Tensor) and streams.dim() == 4:
                wide = streams.float()
                place["spread"] = (wide - wide.mean(-2, keepdim=True)).norm() / wide.norm().clamp_min(1e-30)
            if hasattr(module, "mixing"):
                place["mixing"] = module.mixing(streams).float()
            weights = module.depth_weights(streams) if hasattr(module, "depth_weights") else None
            if weights is not None and len(weights) > 1:
                weights = weights.float()
                entropy = -(weights * weights.clamp_min(1e-30).log()).sum(0).mean()
                place["entropy"] = entropy / math.log(len(weights))
            self._seen[index] = place

        return read


def health(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, float]:
    """One forward pass without gradients; returns `Probe.values` of it.

    Args:
        model: a converted model.
        args, kwargs: the model's inputs, such as `input_ids` `[batch, seq]`.

    Raises:
        UnsupportedModelError: the model is not converted.
    """
    with Probe(model) as probe, torch.no_grad():
        model(*args, **kwargs)
    return probe.values()


def connection_grad_norm(model: nn.Module) -> float | None:
    """The norm of the gradient of what conversion added; None before a backward pass.

    With sharded parameters every process must call it.
    """
    grads = [parameter.grad for parameter in added_parameters(model).values() if parameter.grad is not None]
    if not grads:
        return None
    norm = torch.nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _inner(module: nn.Module) -> nn.Module:
    """The module that runs: PEFT puts a wrapper with copies in the place of one that it trains."""
    copies = getattr(module, "modules_to_save", None)
    return module if copies is None else copies[module.active_adapters[0]]
