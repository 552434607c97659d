"""Follow the residual stream through the source of a decoder layer's `forward`.

The walk goes through the statements in the order in which they run and keeps, for every variable, the stream that it
holds. Each use of a stream is one of four kinds:

- alias: `residual = hidden_states` gives it another name;
- add: it is a term of a sum; the sum is the next stream;
- pass: the layer returns it;
- read: anything else; a branch reads it.

Conditions that the instance settles are followed one way only; the others both ways, and what a variable holds
afterwards is a stream that joins the two.
"""

import ast
from dataclasses import dataclass, field

from torch import nn

from resswap.errors import UnsupportedModelError

from .source import MethodSource
from .static import UNKNOWN, evaluate

Path = tuple[tuple[list[ast.stmt], int], ...]
"""Where a statement is: from the function's body inwards, each block and the index in it."""


@dataclass(eq=False)
class Use:
    """One use of a stream: its kind, the node to edit, where it is, and when it came in the walk."""

    kind: str
    node: ast.AST
    path: Path
    order: int


@dataclass(eq=False)
class Add(Use):
    """A residual add: `node` is the sum or the augmented assignment, `term` the stream's own term, then the rest."""

    term: ast.Name
    others: list[ast.expr]


@dataclass(eq=False)
class Stream:
    """What travels on the residual path between two adds. `joins` are the streams that it may be, by way."""

    uses: list[Use] = field(default_factory=list)
    joins: list[tuple[list[ast.stmt], "Stream"]] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Use]:
        return [use for use in self.uses if use.kind == kind]


@dataclass(frozen=True)
class Packed:
    """A tuple whose first element is a stream, on its way out."""

    stream: Stream


@dataclass(frozen=True)
class Conflict:
    """A stream on one way and something else on another."""


Value = Stream | Packed | Conflict | None


class Trace:
    """The streams of one layer, found by walking through its `forward`.

    Attributes:
        streams: all streams, in the order in which they arise; the first is the layer's input.
        calls: the names of the modules that are called (`self.NAME(...)`), with when they came in the walk.
    """

    def __init__(self, source: MethodSource, layer: nn.Module, parameter: str) -> None:
        self.source = source
        self.layer = layer
        self.calls: list[tuple[int, str]] = []
        self.streams: list[Stream] = []
        self._env: dict[str, Value] = {parameter: self._new_stream()}
        self._path: Path = ()
        self._order = 0
        self._returned = False
        self._block(source.node.body)
        if not self._returned:
            raise UnsupportedModelError(f"{source.name} does not return the residual stream.")

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
        if isinstance(value, Stream):
            self._use(value, Use("pass", node.value, self._path, self._tick()))
        elif not isinstance(value, Packed):
            raise UnsupportedModelError(
                f"What the layer returns is not the residual stream in {self.source.at(node)}."
            )
        self._returned = True

    def _if(self, node: ast.If) -> bool:
        test = evaluate(node.test, self.layer, self.source.function.__globals__)
        if test is not UNKNOWN:
            return self._block(node.body if test else node.orelse)
        self._read_all(node.test)
        before, ends = dict(self._env), []
        for arm in (node.body, node.orelse):
            self._env = dict(before)
            if self._block(arm):
                ends.append((arm, self._env))
        if len(ends) == 2:
            self._env = self._join(*ends)
        elif ends:
            self._env = ends[0][1]
        return bool(ends)

    def _join(self, *ends: tuple[list[ast.stmt], dict[str, Value]]) -> dict[str, Value]:
        (_, first), (_, second) = ends
        joined: dict[str, Value] = {}
        for name in first.keys() | second.keys():
            a, b = first.get(name), second.get(name)
            if a is b or a == b:
                joined[name] = a
            elif isinstance(a, Stream) and isinstance(b, Stream):
                joined[name] = self._new_stream([(arm, env[name]) for arm, env in ends])
            else:
                joined[name] = Conflict()
        return joined

    def _store(self, target: ast.expr, value: Value, statement: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, Stream) and isinstance(statement.value, ast.Name):
                self._use(value, Use("alias", statement, self._path, self._tick()))
            self._env[target.id] = value
            return
        if value is not None:
            raise UnsupportedModelError(f"The residual stream is stored away in {self.source.at(statement)}.")
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._env[node.id] = None
            elif isinstance(node, ast.Name):
                self._read(node, self._lookup(node))

    def _augmented(self, node: ast.AugAssign) -> None:
        if not isinstance(node.op, ast.Add) or not isinstance(node.target, ast.Name):
            self._read_all(node.value)
            return
        load = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        self._env[node.target.id] = self._sum(node, [load, node.value])

    def _opaque(self, node: ast.stmt) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and self._lookup(inner) is not None:
                if not isinstance(inner.ctx, ast.Load):
                    raise UnsupportedModelError(f"The residual stream is reassigned inside {self.source.at(inner)}.")
                self._read(inner, self._lookup(inner))

    # expressions

    def _value(self, node: ast.AST) -> Value:
        """Walk an expression; what it gives, if that is a stream."""
        if isinstance(node, ast.Name):
            return self._lookup(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._sum(node, _terms(node))
        if isinstance(node, ast.Tuple) and node.elts:
            first = self._value(node.elts[0])
            for element in node.elts[1:]:
                self._read(element, self._value(element))
            if isinstance(first, Stream):
                self._use(first, Use("pass", node.elts[0], self._path, self._tick()))
                return Packed(first)
            self._read(node.elts[0], first)
            return None
        if isinstance(node, ast.IfExp):
            test = evaluate(node.test, self.layer, self.source.function.__globals__)
            if test is not UNKNOWN:
                return self._value(node.body if test else node.orelse)
        self._read_all(node)
        if isinstance(node, ast.Call):
            self._called(node.func)
        return None

    def _sum(self, node: ast.AST, terms: list[ast.expr]) -> Value:
        values = [self._value(term) for term in terms]
        if any(isinstance(value, Packed) for value in values):
            return next(value for value in values if isinstance(value, Packed))
        found = [index for index, value in enumerate(values) if isinstance(value, Stream)]
        for index, (term, value) in enumerate(zip(terms, values, strict=True)):
            if index not in found:
                self._read(term, value)
        if not found:
            return None
        if len(found) > 1:
            raise UnsupportedModelError(f"Two residual streams are added together in {self.source.at(node)}.")
        term = terms[found[0]]
        if not isinstance(term, ast.Name):
            raise UnsupportedModelError(f"The residual add is not to a variable in {self.source.at(node)}.")
        others = [other for other in terms if other is not term]
        self._use(values[found[0]], Add("add", node, self._path, self._tick(), term, others))
        return self._new_stream()

    def _read_all(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self._read(child, self._value(child))

    def _read(self, node: ast.AST, value: Value) -> None:
        if value is None:
            return
        if isinstance(value, Stream) and isinstance(node, ast.Name):
            self._use(value, Use("read", node, self._path, self._tick()))
            return
        raise UnsupportedModelError(
            f"The residual stream goes on through something other than an add in {self.source.at(node)}."
        )

    # bookkeeping

    def _lookup(self, node: ast.Name) -> Value:
        value = self._env.get(node.id)
        if isinstance(value, Conflict):
            raise UnsupportedModelError(f"Only on some ways is it the residual stream: {self.source.at(node)}.")
        return value

    def _called(self, function: ast.expr) -> None:
        while isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name) and function.value.id == "self":
                self.calls.append((self._tick(), function.attr))
                return
            function = function.value

    def _use(self, stream: Stream, use: Use) -> None:
        stream.uses.append(use)

    def _new_stream(self, joins: list[tuple[list[ast.stmt], Stream]] | None = None) -> Stream:
        stream = Stream(joins=joins or [])
        self.streams.append(stream)
        return stream

    def _tick(self) -> int:
        self._order += 1
        return self._order


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _terms(node.left) + _terms(node.right)
    return [node]
