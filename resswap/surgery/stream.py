"""What a walk through a method finds: streams and their uses."""

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resswap.errors import UnsupportedModelError

if TYPE_CHECKING:
    from .trace import Trace

Path = tuple[tuple[list[Any], int], ...]
"""Where a statement is: from the function's body inwards, each block and the index in it."""


@dataclass(eq=False)
class Use:
    """One use of a stream.

    Attributes:
        kind: see the docstring of `trace`.
        node: what is to be edited: the name, the alias statement, the sum, the map or the argument.
        stream: the stream that is used.
        path, order: where it is, and when it came in the walk.
        operand: of an add, the stream's own term; of a map, the expression that it applies to.
        others: of an add, the other terms.
        candidate: of a read, the map that it would be if the stream is not used afterwards, and whether a norm.
        of_all: of a read, whether it asks only for the dtype or device, which all streams have in common.
        result: of an add, a map, an enter or a lend, the next stream.
        unit: of an enter or a lend, the walk through what was called.
        call: of an enter or a lend, the call.
    """

    kind: str
    node: ast.AST
    stream: "Stream"
    path: Path
    order: int
    operand: ast.expr | None = None
    others: list[ast.expr] = field(default_factory=list)
    candidate: tuple[ast.expr, bool] | None = None
    of_all: bool = False
    result: "Stream | None" = None
    unit: "Trace | None" = None
    call: ast.Call | None = None


@dataclass(eq=False)
class Stream:
    """What travels on the residual path.

    Attributes:
        uses: in the order of the walk.
        joins: the streams that it may be, each with the block that leads to it.
        origin: the use that gave it; None for the method's input and for joins.
        norm: whether a norm gave it.
    """

    uses: list[Use] = field(default_factory=list)
    joins: list[tuple[list[Any], "Stream"]] = field(default_factory=list)
    origin: Use | None = None
    norm: bool = False

    def of_kind(self, *kinds: str) -> list[Use]:
        return [use for use in self.uses if use.kind in kinds]


@dataclass(frozen=True)
class Packed:
    """A tuple whose first element is a stream."""

    stream: Stream


@dataclass(frozen=True)
class Conflict:
    """A stream on one way and something else on another."""


Value = Stream | Packed | Conflict | None


class NotReturned(UnsupportedModelError):
    """What a method returns is not its stream: it is a branch and not on the residual path."""


class Revised(Exception):
    """A decision was corrected: walk again."""


@dataclass
class Decisions:
    reads: set[ast.AST] = field(default_factory=set)  # sums and calls that do not take the stream over
    maps: set[ast.AST] = field(default_factory=set)
