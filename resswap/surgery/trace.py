"""Follow the residual stream through the source of a method.

The walk goes through the statements in the order in which they run and keeps, for every variable, the stream that it
holds. Each use of a stream is one of these kinds:

- alias: `residual = hidden_states` gives it another name;
- add: it is a term of a sum and not used afterwards; the sum is the next stream;
- map: a norm, scale, cast or reshape takes it, and it is not used afterwards; the result is the next stream;
- enter: a submodule or method takes it and gives the next stream, with connections of its own inside;
- lend: a submodule, method or helper takes it only to add to it; the result is the next stream;
- pass: the method returns it;
- read: anything else; a branch reads it.

Conditions that the instance settles are followed one way only; the others both ways, and what a variable holds
afterwards is a stream that joins the two. What is not used afterwards shows only later in the walk: a decision that
turns out wrong is corrected, and the walk starts again.
"""

import ast
from typing import Any

from torch import nn

from .expressions import ExpressionWalk
from .source import MethodSource
from .static import UNKNOWN
from .stream import Conflict, Decisions, NotReturned, Packed, Path, Revised, Stream, Use, Value


def trace_method(source: MethodSource, module: nn.Module, parameter: str) -> "Trace":
    """Walk through a method whose `parameter` is the stream.

    Raises:
        UnsupportedModelError: the stream takes a way that cannot be followed, or is not what the method returns.
    """
    decisions = Decisions()
    while True:
        try:
            trace = Trace(source, module, parameter, decisions)
        except Revised:
            continue
        dying = next((use for stream in trace.streams if (use := trace.map_that_it_dies_at(stream))), None)
        if dying is not None:
            decisions.maps.add(dying.candidate[0])
        elif trace.failure:
            raise trace.failure
        else:
            return trace


class Trace(ExpressionWalk):
    """One walk. `streams[0]` is the input; `returned` are those that the method may return, `packed` in a tuple."""

    def __init__(self, source: MethodSource, module: nn.Module, parameter: str, decisions: Decisions) -> None:
        super().__init__(source, module, decisions)
        self.returned: list[Stream] = []
        self.packed = False
        self._env[parameter] = self._new_stream()
        if self._block(source.node.body) or not self.returned:
            self._fail(f"{source.where} does not return the residual stream.", NotReturned)

    def contains_add(self) -> bool:
        """Whether an add lies in the method or in what it calls."""
        return any(use.kind in ("add", "lend") or use.unit for stream in self.streams for use in stream.uses)

    def is_lent(self) -> bool:
        """Whether the method does nothing with its stream but add to it."""
        stream = self.streams[0]
        while (maps := stream.of_kind("map")) and not maps[0].result.norm:
            stream = maps[0].result
        kinds = {use.kind for use in stream.uses} - {"alias"}
        return bool(kinds) and kinds <= {"add", "lend"} and not self.streams[0].of_kind("read", "enter", "pass")

    def flows_on(self, stream: Stream, opening: Path = (), kinds: tuple[str, ...] = ("pass", "enter", "map")) -> bool:
        """Whether a stream is needed after `opening`: for a use of `kinds`, or joined with another and used."""
        if stream.of_kind(*kinds):
            return True
        blocks = [block for block, _ in opening]
        for join in self.streams:
            for arm, joined in join.joins:
                other_arms = [other for other, _ in join.joins if other is not arm]
                elsewhere = any(block is other for block in blocks for other in other_arms)
                if joined is stream and not elsewhere and (join.uses or self.flows_on(join, opening)):
                    return True
        return False

    def map_that_it_dies_at(self, stream: Stream) -> Use | None:
        """The last read of a stream that is neither added to nor goes on, if that read can be a map."""
        if stream.of_kind("add", "lend") or self.flows_on(stream):
            return None
        reads = stream.of_kind("read")
        return reads[-1] if reads and reads[-1].candidate else None

    def _follow(self, source: MethodSource, module: nn.Module, parameter: str) -> "Trace":
        return trace_method(source, module, parameter)

    # statements

    def _block(self, statements: list[ast.stmt]) -> bool:
        """Walk a block; False if it never runs past its end."""
        outer = self._path
        for index, statement in enumerate(statements):
            self._path = (*outer, (statements, index))
            if not self._statement(statement):
                self._path = outer
                return False
        self._path = outer
        return True

    def _statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Return):
            self._return(node)
            return False
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.With):
            for item in node.items:
                self._read_all(item)
            return self._block(node.body)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = self._value(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._store(target, value, node)
        elif isinstance(node, ast.AugAssign):
            self._augmented(node)
        elif isinstance(node, (ast.For, ast.While, ast.Try, ast.FunctionDef, ast.ClassDef)):
            self._opaque(node)
        else:
            self._read_all(node)
        return not isinstance(node, (ast.Raise, ast.Continue, ast.Break))

    def _return(self, node: ast.Return) -> None:
        value = None if node.value is None else self._value(node.value)
        if isinstance(value, Packed):
            self.returned.append(value.stream)
            self.packed = True
        elif isinstance(value, Stream):
            self._use(value, "pass", node.value)
            self.returned.append(value)
        else:
            where = self.source.at(node)
            message = f"What the layer returns is not the residual stream in {where}. {self.unfollowed}".rstrip()
            self._fail(message, NotReturned)

    def _if(self, node: ast.If) -> bool:
        test = self._evaluate(node.test)
        if test is not UNKNOWN:
            return self._block(node.body if test else node.orelse)
        self._read_all(node.test)
        env, taken = dict(self._env), dict(self._taken)
        ends = []
        for arm in (node.body, node.orelse):
            self._env, self._taken = dict(env), dict(taken)
            if self._block(arm):
                ends.append((arm, self._env, self._taken))
        if not ends:
            return False
        self._taken = {stream: where for _, _, end in ends for stream, where in end.items()}
        self._env = ends[0][1]
        if len(ends) == 2:
            names = ends[0][1].keys() | ends[1][1].keys()
            self._env = {name: self._joined([(arm, end.get(name)) for arm, end, _ in ends]) for name in names}
        return True

    def _joined(self, values: list[tuple[list[Any], Value]]) -> Value:
        (_, first), (_, second) = values
        if first is second or first == second:
            return first
        if isinstance(first, Stream) and isinstance(second, Stream):
            return self._new_stream(joins=values)
        return Conflict()

    def _store(self, target: ast.expr, value: Value, statement: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, Stream) and isinstance(statement.value, ast.Name):
                self._use(value, "alias", statement)
            if value is None and target.id in self.source.assigned_once:
                self._settled[target.id] = self._evaluate(statement.value)
            self._env[target.id] = value
            return
        names = [node for node in ast.walk(target) if isinstance(node, ast.Name)]
        for node in names:
            if isinstance(node.ctx, ast.Store):
                self._env[node.id] = None
            else:
                self._read(node, self._lookup(node))
        if isinstance(value, Packed) and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
            self._env[target.elts[0].id] = value.stream
        elif value is not None:
            self._fail(f"The residual stream is stored away in {self.source.at(statement)}.")

    def _augmented(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self._read_all(node.value)
            return
        load = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        if isinstance(node.op, ast.Add):
            self._env[node.target.id] = self._sum(node, [load, node.value])
            return
        value = self._lookup(load)
        self._read(node.value, self._value(node.value))
        if isinstance(value, Stream):
            if not isinstance(node.op, (ast.Mult, ast.Div)):
                self._fail(f"The residual stream is changed in {self.source.at(node)}.")
            value = self._mapped(node, load, value)
        self._env[node.target.id] = value

    def _opaque(self, node: ast.stmt) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and self._lookup(inner) is not None:
                if not isinstance(inner.ctx, ast.Load):
                    self._fail(f"The residual stream is reassigned inside {self.source.at(inner)}.")
                else:
                    self._read(inner, self._lookup(inner))
