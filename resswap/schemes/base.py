"""What a scheme is: a dataclass of options that builds the modules of a family of connections."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, get_type_hints

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
        kind, begins, swapped: what it was made for, as in `resswap.installation.Slot`.
        tower: whose layers it serves, "decoder" or "encoder".
    """

    kernels: str = "auto"

    param_dtype: torch.dtype | None = None
    kind: str = ""
    begins: bool = False
    swapped: bool = True
    tower: str = "decoder"

    def weights(self, streams: Any) -> Weights:
        """How it weighs the streams that its `forward` takes, for diagnostics. By default nothing is known."""
        return Weights()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return super()._apply(fn if self.param_dtype is None else partial(_keep_dtype, fn), recurse)


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
        layer: the index of its layer, from 0.
        opens_layer, closes_layer: whether it is the first connection of its layer, or the last.
    """

    hidden_size: int
    index: int
    num_connections: int
    begins: bool
    layer: int = 0
    opens_layer: bool = True
    closes_layer: bool = True


class Add:
    """How a branch is added: called with its output `[batch, seq, hidden]`, it gives the new streams.

    Args:
        streams: the streams that the branch has read: a tensor, or what has a `map` over its tensors.
        write: a function of streams and output that gives the new streams, in the streams' dtype.
    """

    def __init__(self, streams: Any, write: Callable[[Any, Tensor], Any]) -> None:
        self.streams, self.write = streams, write

    def __call__(self, y: Tensor) -> Any:
        return self.write(self.streams, y)

    def through(self, function: Callable[[Tensor], Tensor]) -> "Add":
        """The same add to streams that a function of hidden states, a scale, cast or reshape, was applied to, as in
        `alpha * residual + y`. A tensor is one stream; what is no tensor has a `map`."""
        streams = self.streams
        return type(self)(function(streams) if isinstance(streams, Tensor) else streams.map(function), self.write)


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

    Returns:
        A `dataclasses.field`, with all of this in its `metadata`.
    """
    return dataclasses.field(default=default, metadata={"help": help, "allowed": allowed, "check": check})


@dataclasses.dataclass(frozen=True)
class SchemeConfig:
    """Base of the options of all schemes: a subclass, a frozen dataclass whose fields are made by `option`, is one.

    A subclass has to give the connections. As long as what travels between them is one tensor of hidden states
    `[batch, seq, hidden]`, the other methods can stay as they are here; a scheme of several streams, or of sources,
    replaces them all.

    Class attributes:
        scheme: the name that `resswap.convert` knows it by.
        preserves_function: whether a model computes the same straight after conversion.
    """

    scheme: ClassVar[str]
    preserves_function: ClassVar[bool] = True

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            expected = (int, float) if types[field.name] is float else types[field.name]
            right_type = isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
            infinite = isinstance(value, float) and not math.isfinite(value)
            if not right_type or infinite or not field.metadata["check"](value):
                raise OptionError(f"{self.scheme}: {field.name}={value!r}; allowed: {field.metadata['allowed']}.")

    def connection(self, place: Place) -> Connection:
        """The connection at `place`, initialised without random numbers; it is cast to its layer's dtype later.

        Raises:
            OptionError: an option does not fit the model, such as a block that starts beyond the last connection.
        """
        raise NotImplementedError

    def plain_connection(self, place: Place) -> Connection:
        """The connection at an add that is not swapped: the plain residual, on the streams of this scheme."""
        return PlainConnection(place.index)

    def expand(self, hidden_size: int) -> ResidualModule:
        """The module that makes the streams of the hidden states `[batch, seq, hidden]`, before the first layer."""
        return OneStream()

    def stream_map(self, hidden_size: int, is_norm: bool) -> ResidualModule:
        """The module that applies to the streams what a layer does to the hidden states between two adds.

        Its `forward` takes the streams and a function of hidden states, a norm or a linear one, and gives the new
        streams; without a function, it gives hidden states that stand for the streams.

        Args:
            is_norm: whether the function is a norm; otherwise it is linear.
        """
        return OneStream()

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        """The module that makes hidden states of the streams, after the last layer.

        It is also called on what each layer returns where a model is asked for hidden states, and on hidden states
        `[batch, seq, hidden]`, which go through as they are.
        """
        return OneStream()


def _plain(value: Any) -> Any:
    """A number such as NumPy's as one of Python's, which config.json can hold; a list, as it gives it, as a tuple."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(element) for element in value)
    if isinstance(value, (bool, int)) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


_SCHEMES: dict[str, type[SchemeConfig]] = {}

RESERVED = {"model", "scheme", "towers", "param_dtype", "layers", "sites", "kernels"}
"""Arguments of `resswap.convert`, which no option can be named after."""


def register_scheme(config_class: type[SchemeConfig]) -> type[SchemeConfig]:
    """Class decorator: make a scheme known by its `scheme` name, to `resswap.convert` and to saved models.

    The module with the class has to be imported before a model saved with the scheme is loaded.

    Args:
        config_class: a frozen dataclass derived from `SchemeConfig`. Defining it again, as a notebook's cell does,
            replaces it.

    Returns:
        The same class.

    Raises:
        OptionError: it is no such class, or the name is taken.
    """
    name = getattr(config_class, "__qualname__", repr(config_class))
    if not isinstance(config_class, type) or not issubclass(config_class, SchemeConfig):
        raise OptionError(f"{name} is not a class derived from resswap.SchemeConfig.")
    scheme = getattr(config_class, "scheme", None)
    if not isinstance(scheme, str) or not scheme:
        raise OptionError(f'{name} needs a name: a class attribute `scheme: ClassVar[str] = "..."`.')
    if "__dataclass_params__" not in vars(config_class) or not config_class.__dataclass_params__.frozen:
        raise OptionError(f"{name} is not a frozen dataclass: put @dataclass(frozen=True) below @register_scheme.")
    for field in dataclasses.fields(config_class):
        if not {"help", "allowed", "check"} <= set(field.metadata):
            raise OptionError(f"{name}.{field.name} is not made by resswap.option, which says what is allowed.")
        if field.name in RESERVED:
            raise OptionError(f"{name}.{field.name}: resswap.convert has an argument of this name; choose another.")
    known = _SCHEMES.get(scheme)
    if known is not None and (known.__module__, known.__qualname__) != (config_class.__module__, name):
        raise OptionError(f"The scheme {scheme!r} is {known.__module__}.{known.__qualname__}; choose another name.")
    _SCHEMES[scheme] = config_class
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
        raise OptionError(
            f"There is no scheme {scheme!r}; available: {', '.join(_SCHEMES)}. One of your own is known once the "
            "module that defines it with resswap.register_scheme has been imported."
        )
    config_class = _SCHEMES[scheme]
    names = [field.name for field in dataclasses.fields(config_class)]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise OptionError(f"The scheme {scheme!r} has no option {unknown[0]!r}; its options: {', '.join(names)}.")
    return config_class(**options)


class OneStream(ResidualModule):
    """For schemes whose one stream is the hidden states: each end and each map of it."""

    def forward(self, streams: Tensor, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return streams if function is None else function(streams)

    def weights(self, streams: Tensor) -> Weights:
        return Weights(read=torch.ones(1))


class PlainConnection(Connection):
    """The plain residual: the branch reads the hidden states, and its output is added to them."""

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        return streams, Add(streams, torch.add)

    def weights(self, streams: Tensor) -> Weights:
        return Weights(read=torch.ones(1), write=torch.ones(1))
