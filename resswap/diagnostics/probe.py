"""Watch the forward passes of a converted model by hooks that leave no trace."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from resswap.conversion import connections
from resswap.errors import UnsupportedModelError
from resswap.schemes import Connection
from resswap.surgery import READOUT
from resswap.training import added_parameters

from .measures import Measures, norm, numbers, of_mixing, of_streams, of_weights, rms, summary


class Probe:
    """Watches the forward passes of a converted model until it is closed; of several passes the last one counts.
    Of an encoder-decoder, whose encoder has streams of its own, it watches the decoder.

    Use it as a context manager, or call `close`. Parameters, outputs and gradients are what they are without it.

    Raises:
        UnsupportedModelError: the model is not converted.
    """

    def __init__(self, model: nn.Module) -> None:
        found = connections(model)
        if not found:
            raise UnsupportedModelError(f"{type(model).__name__} is not converted: it has no connections to watch.")
        found = {name: connection for name, connection in found.items() if connection.tower == "decoder"}
        self._seen: dict[int, dict[str, Any]] = {}
        self._end = max(connection.index for connection in found.values()) + 1
        self._latest = -1
        ends = {name: _inner(end) for name, end in model.named_modules() if name.rpartition(".")[2] == READOUT}
        ends = {name: end for name, end in ends.items() if end.tower == "decoder"}
        self._hooks = []
        for name, module in (found | ends).items():
            index = module.index if isinstance(module, Connection) else self._end
            self._hooks.append(module.register_forward_pre_hook(self._before(name, index)))
            self._hooks.append(module.register_forward_hook(self._after(index)))

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off; what was seen can still be asked for."""
        for hook in self._hooks:
            hook.remove()

    def measures(self) -> list[Measures]:
        """What the last forward pass, and the backward pass after it, showed: the connections in the order of depth,
        then the read-out; empty before the first."""
        measures, product = [], None
        for index in sorted(self._seen):
            place = dict(self._seen[index])
            mixing = place.pop("mixing", None)
            if mixing is not None:
                found, product = of_mixing(mixing, product)
                place |= found
            measures.append(Measures(**numbers(place)))
        return measures

    def values(self) -> dict[str, float]:
        """The measures summed up in a few numbers; empty before the first forward pass.

        Keys, where the scheme and the pass have what they measure:
            stream_rms_first, stream_rms_last, stream_rms_max: size of the streams (or sources) that the first
                connection and the read-out get, and the largest on the way.
            input_rms_max, output_rms_max: largest size of a branch's input and output.
            stream_spread: spread of the streams before the read-out.
            read_entropy, read_dominance, write_entropy, write_dominance: means over all modules with 2 streams or
                sources on; read_entropy_last is that of the read-out.
            doubly_stochastic_error: the largest.
            gain_forward, gain_backward: those of the product of all mixing matrices.
            gradient_first, gradient_last: norm of the gradient by the first and the last branch's output.
        """
        return summary(self.measures())

    def _before(self, name: str, index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        @torch.no_grad()
        def see(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._is_other_readout(index):
                return
            place = self._seen.setdefault(index, {})  # a recomputation may stop half-way: what was seen stays
            place["name"] = name
            weights = module.weights(args[0])
            used = {kind: w for kind in ("read", "write") if (w := getattr(weights, kind)) is not None}
            place |= of_streams(args[0], max((w.shape[-1] for w in used.values()), default=1))
            for kind, each in used.items():
                place |= of_weights(kind, each)
            if weights.mixing is not None:
                place["mixing"] = weights.mixing.float()

        return see

    def _after(self, index: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def see(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._is_other_readout(index):
                return
            self._latest = index
            place = self._seen[index]
            if index == self._end:
                place["input_rms"] = rms(output.detach())
                return
            read, add = output
            place["input_rms"] = rms(read.detach())
            write = add.write

            def watched_write(streams: Any, y: Tensor) -> Any:
                _see_output(place, y)
                return write(streams, y)

            add.write = watched_write

        return see

    def _is_other_readout(self, index: int) -> bool:
        """Whether this is a read-out of something else, such as recorded hidden states, after that of the streams."""
        return index == self._end and self._latest != self._end - 1


def _see_output(place: dict[str, Any], y: Tensor) -> None:
    place["output_rms"] = rms(y.detach())
    if y.requires_grad and not torch.compiler.is_compiling():  # a compiled graph cannot call back in its backward

        def see(gradient: Tensor) -> None:
            place["gradient_norm"] = norm(gradient)

        y.register_hook(see)


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
