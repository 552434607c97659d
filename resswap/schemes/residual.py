"""The plain residual stream (He et al., arXiv 1512.03385), in the form of a scheme: what the others are measured by.

`resswap.convert` does not know it: a model with these connections is the model that it was, in every parameter.
"""

from dataclasses import dataclass
from typing import ClassVar

from .base import Connection, Place, PlainConnection, SchemeConfig


@dataclass(frozen=True)
class ResidualConfig(SchemeConfig):
    """One stream, which each branch reads and is added to. It has no options."""

    scheme: ClassVar[str] = "residual"

    def connection(self, place: Place) -> Connection:
        return PlainConnection(place.index)
