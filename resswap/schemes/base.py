"""What a scheme is: a dataclass of options that builds the modules of a family of connections."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from resswap.errors import OptionError

from .weights import Weights


class ResidualModule(nn.Module):
    """A module that conversion adds. Its parameters follow the model's dtype, or keep their own.

    Attributes:
        param_dtype: the dtype that the parameters keep when the model is cast, as by `model.to(torch.bfloat16)`.
            None: they are cast with the model.
        kernels: how its inner loops run, see `resswap.set_kernels`. It is not saved with the model.
        kind, begins: what it was made for, as in `resswap.installation.Slot`.
        tower: whose layers it serves, "decoder" or "encoder".
    """

    kernels: str = "auto"

    param_dtype: torch.dtype | None = None
    kind: str = ""
    begins: bool = False
    tower: str = "decoder"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return super()._apply(fn if self.param_dtype is None else partial(_keep_dtype, fn), recurse)

    def weights(self, streams: Any) -> Weights:
        """How the module weighs these streams, for `resswap.inspect`; a scheme tells as much as it has."""
        return Weights()


def _keep_dtype(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What `fn` does to a tensor, save for a cast."""
    probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the stack a connection is.

    Attributes:
        hidden_size: of the model.
        index: its place in the order of depth, from 0.
        num_connections: how many there are.
        begins: whether its streams have just begun: at the start of the stack, or by a norm (post-norm models).
        last_in_layer: whether no other connection of its layer comes after it.
    """

    hidden_size: int
    index: int
    num_connections: int
    begins: bool
    last_in_layer: bool = True


RECOMPUTE_HELP = (
    "Keep the streams once per layer for the backward, and compute those inside the layer again there (section 4.3.2 "
    "of arXiv 2512.24880): less memory, about 2 % more time."
)


class Add:
    """How a branch is added: called with its output `[batch, seq, hidden]`, it gives the new streams.

    Args:
        streams: the streams that the branch has read.
        write: a function of streams and output that gives the new streams.
    """

    def __init__(self, streams: Any, write: Callable[[Any, Tensor], Any]) -> None:
        self.streams, self.write = streams, write

    def __call__(self, y: Tensor) -> Any:
        return self.write(self.streams, y)

    def through(self, function: Callable[[Tensor], Tensor]) -> "Add":
        """The same add to streams that a scale, cast or reshape was applied to, as in `alpha * residual + y`."""
        return Add(map_streams(function, self.streams), self.write)


def map_streams(function: Callable[[Tensor], Tensor], streams: Any) -> Any:
    """Apply a function of hidden states `[batch, seq, hidden]` to each stream.

    Streams that are no tensor have a method `map` that does it, a `dtype` and a `device`.
    """
    if not isinstance(streams, Tensor):
        return streams.map(function)
    return combined([function(stream) for stream in streams.unbind(-2)], lambda parts: torch.stack(parts, dim=-2))


def combined(results: list[Any], combine: Callable[[list[Tensor]], Any]) -> Any:
    """Combine what a function gave for each stream. Of tuples the first elements are; the others are all equal."""
    if isinstance(results[0], tuple):
        return combine([result[0] for result in results]), *results[0][1:]
    return combine(results)


class Connection(ResidualModule):
    """The module that takes a residual add's place. Subclasses own their parameters as `nn.Parameter`, no buffers.

    Attributes:
        index: its place in the order of depth, from 0.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, streams: Any) -> tuple[Tensor, Add]:
        """Read the streams.

        Args:
            streams: what the scheme's expansion or the connection before gave.

        Returns:
            The branch's input `[batch, seq, hidden]`, and how to add its output, which needs no parameters.
        """
        raise NotImplementedError


def option(default: Any, help: str, allowed: str, check: Callable[[Any], bool] = lambda value: True) -> Any:
    """A field of a scheme's options.

    Args:
        default: its default; its type is the type that is accepted.
        help: one sentence for users.
        allowed: what values are allowed, in words.
        check: whether a value of the right type is allowed.
    """
    return dataclasses.field(default=default, metadata={"help": help, "allowed": allowed, "check": check})


@dataclasses.dataclass(frozen=True)
class SchemeConfig:
    """Base of the options of all schemes; a subclass is one scheme.

    Class attributes:
        scheme: the name that `resswap.convert` knows it by.
        preserves_function: whether a model computes the same straight after conversion.
    """

    scheme: ClassVar[str]
    preserves_function: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _plain_number(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            expected = (int, float) if field.type is float else field.type
            right_type = isinstance(value, expected) and (field.type is bool or not isinstance(value, bool))
            infinite = isinstance(value, float) and not math.isfinite(value)
            if not right_type or infinite or not field.metadata["check"](value):
                raise OptionError(f"{self.scheme}: {field.name}={value!r}; allowed: {field.metadata['allowed']}.")

    def expand(self) -> ResidualModule:
        """The module that makes the streams of the hidden states, before the first layer."""
        raise NotImplementedError

    def connection(self, place: Place) -> Connection:
        """The connection at `place`, initialised without random numbers; it is cast to its layer's dtype later."""
        raise NotImplementedError

    def stream_map(self, hidden_size: int, is_norm: bool) -> ResidualModule:
        """The module that applies to the streams what a layer does to the hidden states between two adds.

        Its `forward` takes the streams and a function of hidden states, a norm or a linear one, and gives the new
        streams; without a function, it gives hidden states that stand for the streams.
        """
        raise NotImplementedError

    def readout(self, hidden_size: int) -> ResidualModule:
        """The module that makes hidden states of the streams, after the last layer."""
        raise NotImplementedError


def _plain_number(value: Any) -> Any:
    """A number such as NumPy's as one of Python's, which config.json can hold."""
    if isinstance(value, (bool, int)) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


_SCHEMES: dict[str, type[SchemeConfig]] = {}


def register_scheme(config_class: type[SchemeConfig]) -> type[SchemeConfig]:
    """Class decorator: make a scheme known by its `scheme` name."""
    _SCHEMES[config_class.scheme] = config_class
    return config_class


def available_schemes() -> dict[str, type[SchemeConfig]]:
    """The schemes that `resswap.convert` accepts, by name.

    Returns:
        Name → dataclass of options. `dataclasses.fields` of it gives each option's default, and in its `metadata`
        the keys "help" and "allowed".
    """
    return dict(_SCHEMES)


def scheme_config(scheme: str, options: dict[str, Any]) -> SchemeConfig:
    """The checked options of a scheme.

    Raises:
        OptionError: no such scheme or option (the message lists the valid ones), or a value that is not allowed.
    """
    if not isinstance(scheme, str) or scheme not in _SCHEMES:
        raise OptionError(f"There is no scheme {scheme!r}; available: {', '.join(_SCHEMES)}.")
    config_class = _SCHEMES[scheme]
    names = [field.name for field in dataclasses.fields(config_class)]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise OptionError(f"The scheme {scheme!r} has no option {unknown[0]!r}; its options: {', '.join(names)}.")
    return config_class(**options)


class ExpandStreams(ResidualModule):
    """Hidden states `[batch, seq, hidden]` → n equal streams `[batch, seq, n, hidden]`."""

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        self.num_streams = num_streams

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], self.num_streams, hidden_states.shape[-1])
        return hidden_states.unsqueeze(-2).expand(shape)

    def extra_repr(self) -> str:
        return f"num_streams={self.num_streams}"


class StreamMap(ResidualModule):
    """Applies a function of hidden states to each of the streams `[batch, seq, n, hidden]`."""

    def forward(self, streams: Tensor, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return streams.mean(-2) if function is None else map_streams(function, streams)


class MeanReadout(ResidualModule):
    """Streams `[batch, seq, n, hidden]` → their mean `[batch, seq, hidden]`; hidden states go through as they are."""

    def forward(self, streams: Tensor) -> Tensor:
        return streams if streams.dim() == 3 else streams.mean(-2)

    def weights(self, streams: Tensor) -> Weights:
        n = streams.shape[-2]
        return Weights(read=torch.full((n,), 1 / n))


def rotating_weights(num_streams: int, index: int, peak: float) -> Tensor:
    """Logits, float64 `[n]`, whose sigmoids sum to 1 and peak near `peak` at stream `index % n`.

    With equal weights all streams would get equal gradients and never part; these rotate with depth instead. The sum
    is 1 to rounding in float32 and float64, and to 1e-4 after a cast to bfloat16: of the bfloat16 numbers near
    `logit(peak)`, the one is taken for which the other logit comes nearest to a bfloat16 number.
    """
    target = torch.tensor(peak, dtype=torch.float64).logit()
    near = (target + torch.linspace(-0.15, 0.15, 257, dtype=torch.float64)).bfloat16().double()
    rest = ((1 - near.sigmoid()) / (num_streams - 1)).logit()
    off = (near.sigmoid() + (num_streams - 1) * rest.bfloat16().double().sigmoid() - 1).abs()
    best = off.argmin()
    logits = rest[best].repeat(num_streams)
    logits[index % num_streams] = near[best]
    return logits
