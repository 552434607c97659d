"""Which residual adds of a model are swapped: of which layers, and of which sublayers.

This file travels with saved models: it imports nothing but the standard library.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from resswap.errors import OptionError

SITES = ("all", "attention", "mlp")


@dataclass(frozen=True)
class Selection:
    """Which residual adds are swapped.

    Attributes:
        layers: the indices of layers, ascending, from 0. None: all.
        sites: "attention": the adds of attention and whatever else mixes tokens (recurrences, convolutions); "mlp":
            those of everything else; "all".
    """

    layers: tuple[int, ...] | None = None
    sites: str = "all"

    def described(self) -> dict[str, Any]:
        """The fields of `config.residual` that describe it; none for all adds."""
        fields = {} if self.layers is None else {"layers": list(self.layers)}
        return fields if self.sites == "all" else {**fields, "sites": self.sites}

    def includes(self, layer: int, sites: Iterable[str]) -> bool:
        """Whether an add is swapped.

        Args:
            layer: the index of its layer.
            sites: which of "attention" and "mlp" it adds; both where they are parallel.
        """
        return (self.layers is None or layer in self.layers) and self.sites in ("all", *sites)


def select(layers: Any, sites: Any, num_layers: int) -> Selection:
    """The selection that the arguments of `resswap.convert` stand for.

    Args:
        layers: indices of layers, negative ones from the end; or a slice; or None for all.
        sites: one of `SITES`.
        num_layers: how many layers there are.

    Raises:
        OptionError: a layer or a kind of sublayer that does not exist, or no layer at all.
    """
    if not isinstance(sites, str) or sites not in SITES:
        raise OptionError(f"sites={sites!r}; allowed: {', '.join(map(repr, SITES))}.")
    if layers is None:
        return Selection(None, sites)
    if isinstance(layers, slice):
        try:
            chosen = set(range(num_layers)[layers])
        except (TypeError, ValueError) as error:
            raise OptionError(f"layers={layers!r}: {error}.") from error
    else:
        chosen = {_index(layer, layers, num_layers) for layer in _elements(layers)}
    if not chosen:
        raise OptionError(f"layers={layers!r} chooses none of the model's {num_layers} layers.")
    return Selection(None if len(chosen) == num_layers else tuple(sorted(chosen)), sites)


def _elements(layers: Any) -> list[Any]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise OptionError(
            f"layers={layers!r}; allowed: a list of indices such as [0, 1, -1], a slice, or None for all."
        )
    return list(layers)


def _index(layer: Any, layers: Any, num_layers: int) -> int:
    try:
        index = operator.index(layer)
    except TypeError:
        index = None
    if index is None or isinstance(layer, bool):
        raise OptionError(f"layers={layers!r}: {layer!r} is not the index of a layer, a whole number.")
    if not -num_layers <= index < num_layers:
        raise OptionError(
            f"layers={layers!r}: the model has {num_layers} layers, so {index} is out of range; allowed: "
            f"{-num_layers} to {num_layers - 1}."
        )
    return index % num_layers
