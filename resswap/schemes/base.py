"""What a scheme is: a dataclass of options that builds the modules of a family of connections."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from resswap.errors import OptionError

AddBranch = Callable[[Tensor], Any]
"""Takes the branch's output `y` (shape `[batch, seq, hidden]`) and gives the new streams."""


class ResidualModule(nn.Module):
    """A module that conversion adds. Its parameters follow the model's dtype, or keep their own.

    Attributes:
        param_dtype: the dtype that the parameters keep when the model is cast, as by `model.to(torch.bfloat16)`.
            None: they are cast with the model.
    """

    param_dtype: torch.dtype | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return super()._apply(fn if self.param_dtype is None else partial(_keep_dtype, fn), recurse)


def _keep_dtype(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What `fn` does to a tensor, save for a cast."""
    probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)


class Connection(ResidualModule):
    """The module that takes a residual add's place. Subclasses own their parameters as `nn.Parameter`, no buffers.

    Attributes:
        index: its place in the order of depth, from 0.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, streams: Any) -> tuple[Tensor, AddBranch]:
        """Read the streams.

        Args:
            streams: what the scheme's expansion or the connection before gave.

        Returns:
            The branch's input `[batch, seq, hidden]`, and a function of the branch's output that gives the new
            streams and needs no parameters of its own.
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
            value = getattr(self, field.name)
            expected = (int, float) if field.type is float else field.type
            right_type = isinstance(value, expected) and (field.type is bool or not isinstance(value, bool))
            infinite = isinstance(value, float) and not math.isfinite(value)
            if not right_type or infinite or not field.metadata["check"](value):
                raise OptionError(f"{self.scheme}: {field.name}={value!r}; allowed: {field.metadata['allowed']}.")

    def expand(self, hidden_size: int, num_connections: int) -> nn.Module:
        """The module that makes the streams of the hidden states, before the first layer."""
        raise NotImplementedError

    def connection(self, index: int, hidden_size: int, num_connections: int) -> Connection:
        """The connection at `index`, initialised without random numbers; it is cast to its layer's dtype later."""
        raise NotImplementedError

    def readout(self, hidden_size: int, num_connections: int) -> nn.Module:
        """The module that makes hidden states of the streams, after the last layer."""
        raise NotImplementedError


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
    if scheme not in _SCHEMES:
        raise OptionError(f"There is no scheme {scheme!r}; available: {', '.join(_SCHEMES)}.")
    config_class = _SCHEMES[scheme]
    names = [field.name for field in dataclasses.fields(config_class)]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise OptionError(f"The scheme {scheme!r} has no option {unknown[0]!r}; its options: {', '.join(names)}.")
    return config_class(**options)


class ExpandStreams(nn.Module):
    """Hidden states `[batch, seq, hidden]` → n equal streams `[batch, seq, n, hidden]`."""

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        self.num_streams = num_streams

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], self.num_streams, hidden_states.shape[-1])
        return hidden_states.unsqueeze(-2).expand(shape).contiguous()

    def extra_repr(self) -> str:
        return f"num_streams={self.num_streams}"


class MeanReadout(nn.Module):
    """Streams `[batch, seq, n, hidden]` → their mean `[batch, seq, hidden]`; hidden states go through as they are."""

    def forward(self, streams: Tensor) -> Tensor:
        return streams if streams.dim() == 3 else streams.mean(-2)


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
