"""What a connection can tell of the weights that it gives its streams."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """How a module weighs the k streams (or sources) that it was given; None for what its scheme does not have.

    Leading dimensions are those of the tokens; weights that do not depend on the token may leave them out.

    Attributes:
        read: `[..., k]`, the weight of each stream in what is read.
        write: `[..., k]`, the weight of the branch's output in each stream.
        mixing: `[..., k, k]`, the weight of old stream j in new stream i, at `[..., j, i]`.
    """

    read: Tensor | None = None
    write: Tensor | None = None
    mixing: Tensor | None = None
