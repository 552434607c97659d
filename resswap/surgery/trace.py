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
import types
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from resswap.errors import UnsupportedModelError

from .source import MethodSource
from .static import STREAM, UNKNOWN, evaluate

Path = tuple[tuple[list[Any], int], ...]
"""Where a statement is: from the function's body inwards, each block and the index in it."""

LINEAR_METHODS = {"to", "float", "half", "type", "type_as", "view", "reshape", "contiguous", "clone", "unsqueeze", "squeeze"}


@dataclass(eq=False)
class Use:
    """One use of a stream.

    Attributes:
        kind: see the module's docstring.
        node: what is to be edited: the name, the alias statement, the sum, the map or the argument.
        stream: the stream that is used.
        path, order: where it is, and when it came in the walk.
        operand: of an add, the stream's own term; of a map, the expression that it applies to.
        others: of an add, the other terms.
        candidate: of a read, the map that it would be if the stream is not used afterwards, and whether a norm.
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


class _Revised(Exception):
    """A decision was corrected: walk again."""


@dataclass
class _Decisions:
    reads: set[ast.AST] = field(default_factory=set)  # sums and calls that do not take the stream over
    maps: set[ast.AST] = field(default_factory=set)


def trace_method(source: MethodSource, module: nn.Module, parameter: str) -> "Trace":
    """Walk through a method whose `parameter` is the stream.

    Raises:
        UnsupportedModelError: the stream takes a way that cannot be followed, or is not what the method returns.
    """
    decisions = _Decisions()
    while True:
        try:
            trace = Trace(source, module, parameter, decisions)
        except _Revised:
            continue
        dying = next((use for stream in trace.streams if (use := trace.map_that_it_dies_at(stream))), None)
        if dying is not None:
            decisions.maps.add(dying.candidate[0])
        elif trace.failure:
            raise UnsupportedModelError(trace.failure)
        else:
            return trace


class Trace:
    """One walk. `streams[0]` is the input; `returned` are the streams that the method may return, `packed` in a tuple.

    `calls` are the names of the modules that are called (`self.NAME(...)`), with when they came in the walk.
    """

    def __init__(self, source: MethodSource, module: nn.Module, parameter: str, decisions: _Decisions) -> None:
        self.source, self.module, self.parameter = source, module, parameter
        self.calls: list[tuple[int, str]] = []
        self.streams: list[Stream] = []
        self.returned: list[Stream] = []
        self.packed = False
        self.failure = ""
        self._decisions = decisions
        self._env: dict[str, Value] = {parameter: self._new_stream()}
        self._taken: dict[Stream, ast.AST] = {}  # on this way: the streams that were added to or handed on, and where
        self._path: Path = ()
        self._order = 0
        if self._block(source.node.body) or not self.returned:
            self._fail(f"{source.name} does not return the residual stream.")

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
        """Whether the stream itself is needed after `opening`: for a use of `kinds`, or joined with another and used."""
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
            self._fail(f"What the layer returns is not the residual stream in {self.source.at(node)}.")

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

    # expressions

    def _value(self, node: ast.AST) -> Value:
        """Walk an expression; what it gives, if that is a stream."""
        if isinstance(node, ast.Name):
            return self._lookup(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._sum(node, _terms(node))
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
            return self._product(node)
        if isinstance(node, (ast.Tuple, ast.List)) and node.elts:
            return self._display(node)
        if isinstance(node, ast.Subscript):
            value = self._value(node.value)
            if isinstance(value, Packed):
                first = isinstance(node.slice, ast.Constant) and node.slice.value == 0
                return value.stream if first else None
            self._read(node.value, value)
            self._read_all(node.slice)
            return None
        if isinstance(node, ast.IfExp):
            return self._conditional(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        self._read_all(node)
        return None

    def _display(self, node: ast.Tuple | ast.List) -> Value:
        first = self._value(node.elts[0])
        for element in node.elts[1:]:
            self._read(element, self._value(element))
        if isinstance(first, Stream):
            self._use(first, "pass", node.elts[0])
            return Packed(first)
        self._read(node.elts[0], first)
        return None

    def _conditional(self, node: ast.IfExp) -> Value:
        test = self._evaluate(node.test)
        if test is not UNKNOWN:
            return self._value(node.body if test else node.orelse)
        self._read(node.test, self._value(node.test))
        taken = dict(self._taken)
        values = []
        for arm in (node.body, node.orelse):
            before, self._taken = self._taken, dict(taken)
            values.append(([arm], self._value(arm)))
            self._taken = {**before, **self._taken}
        joined = self._joined(values)
        if not isinstance(joined, Conflict):
            return joined
        for (arm,), value in values:
            self._read(arm, value)
        return None

    def _product(self, node: ast.BinOp) -> Value:
        left, right = self._value(node.left), self._value(node.right)
        if isinstance(left, Stream) and right is None:
            return self._map_or_read(node, node.left, left)
        if isinstance(right, Stream) and left is None and isinstance(node.op, ast.Mult):
            return self._map_or_read(node, node.right, right)
        self._read(node.left, left)
        self._read(node.right, right)
        return None

    def _sum(self, node: ast.AST, terms: list[ast.expr]) -> Value:
        values = [self._value(term) for term in terms]
        packed = next((value for value in values if isinstance(value, Packed)), None)
        found = [index for index, value in enumerate(values) if isinstance(value, Stream)]
        if node in self._decisions.reads:
            found = []
        elif len(found) > 1:
            self._fail(f"Two residual streams are added together in {self.source.at(node)}.")
        for index, (term, value) in enumerate(zip(terms, values, strict=True)):
            if index not in found and not isinstance(value, Packed):
                self._read(term, value)
        if packed is not None or not found:
            return packed
        term = terms[found[0]]
        others = [other for other in terms if other is not term]
        return self._take(values[found[0]], "add", node, node, operand=term, others=others)

    def _call(self, node: ast.Call) -> Value:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in LINEAR_METHODS:
            value = self._value(function.value)
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                self._read(argument, self._value(argument))
            if isinstance(value, Stream):
                return self._map_or_read(node, function.value, value)
            self._read(function.value, value)
            return None
        self._read_all(function)
        arguments = [(index, argument) for index, argument in enumerate(node.args)]
        arguments += [(keyword.arg, keyword.value) for keyword in node.keywords]
        values = [self._value(argument) for _, argument in arguments]
        result = self._called_with_stream(node, arguments, values)
        if result is None:
            for (_, argument), value in zip(arguments, values, strict=True):
                self._read(argument, value, candidate=self._norm_candidate(node, argument))
        self._record_call(function)
        return result

    def _called_with_stream(
        self, node: ast.Call, arguments: list[tuple[int | str | None, ast.expr]], values: list[Value]
    ) -> Value:
        """What a call gives that takes the stream over: a norm of a stream without a name, or a method with an add."""
        found = [index for index, value in enumerate(values) if isinstance(value, Stream)]
        if len(found) != 1 or node in self._decisions.reads:
            return None
        key, argument = arguments[found[0]]
        stream = values[found[0]]
        candidate = self._norm_candidate(node, argument)
        if candidate is not None:
            if isinstance(argument, ast.Name) and node not in self._decisions.maps:
                return None
            return self._mapped(node, argument, stream, norm=candidate[1])
        unit = self._unit(node, key)
        if unit is None:
            return None
        others = [(a, v) for (_, a), v in zip(arguments, values, strict=True) if a is not argument]
        for other, value in others:
            self._read(other, value)
        kind = "lend" if unit.is_lent() else "enter"
        result = self._take(stream, kind, argument, node, unit=unit, call=node)
        return Packed(result) if unit.packed else result

    def _unit(self, node: ast.Call, key: int | str | None) -> "Trace | None":
        """The walk through what is called, if it can be followed, returns the stream, and contains an add."""
        if key is None or any(isinstance(argument, ast.Starred) for argument in node.args):
            return None
        callee = node.func
        if isinstance(callee, ast.Name) and callee.id == "apply_chunking_to_forward" and len(node.args) == 4:
            if self._evaluate(node.args[1]) != 0 or key != 3:
                return None
            callee, key = node.args[0], 0
        try:
            source, module = self._callee(callee)
            unit = None if source is None else trace_method(source, module, source.parameter(key))
        except UnsupportedModelError:
            return None
        return unit if unit is not None and unit.contains_add() else None

    def _callee(self, function: ast.expr) -> tuple[MethodSource | None, nn.Module]:
        if isinstance(function, ast.Name):
            target = self.source.function.__globals__.get(function.id)
            return (MethodSource.of_function(target), self.module) if _is_helper(target, self.source) else (None, self.module)
        target = self._evaluate(function)
        if isinstance(target, nn.Module):
            return MethodSource(type(target)), target
        owner = getattr(target, "__self__", None)
        if isinstance(target, types.MethodType) and isinstance(owner, nn.Module):
            return MethodSource(type(owner), target.__name__), owner
        return None, self.module

    def _norm_candidate(self, node: ast.Call, argument: ast.expr) -> tuple[ast.expr, bool] | None:
        """(call, is a norm) if the call is of a norm or a dropout with that one argument."""
        module = self._evaluate(node.func)
        if not isinstance(module, nn.Module) or node.args != [argument] or node.keywords:
            return None
        if "Norm" in type(module).__name__:
            return node, True
        return (node, False) if isinstance(module, (nn.Dropout, nn.Identity)) else None

    # bookkeeping

    def _map_or_read(self, node: ast.expr, operand: ast.expr, stream: Stream) -> Value:
        if isinstance(operand, ast.Name) and node not in self._decisions.maps:
            self._read(operand, stream, candidate=(node, False))
            return None
        return self._mapped(node, operand, stream)

    def _mapped(self, node: ast.AST, operand: ast.expr, stream: Stream, norm: bool = False) -> Stream:
        result = self._take(stream, "map", node, node, operand=operand)
        result.norm = norm
        return result

    def _take(self, stream: Stream, kind: str, node: ast.AST, where: ast.AST, **details: Any) -> Stream:
        """A use that takes the stream over, at `where`, and gives the next one."""
        use = self._use(stream, kind, node, **details)
        self._taken[stream] = where
        use.result = self._new_stream(origin=use)
        return use.result

    def _read_all(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self._read(child, self._value(child))

    def _read(self, node: ast.AST, value: Value, candidate: tuple[ast.expr, bool] | None = None) -> None:
        if isinstance(value, Stream) and isinstance(node, ast.Name):
            self._use(value, "read", node, candidate=candidate)
        elif value is not None and not isinstance(value, Packed):
            self._fail(f"The residual stream goes on through something other than an add in {self.source.at(node)}.")

    def _lookup(self, node: ast.Name) -> Value:
        value = self._env.get(node.id)
        if isinstance(value, Conflict):
            self._fail(f"Only on some ways is it the residual stream: {self.source.at(node)}.")
            return None
        return value

    def _evaluate(self, node: ast.expr) -> Any:
        streams = {name: STREAM for name, value in self._env.items() if isinstance(value, Stream)}
        return evaluate(node, self.module, {**self.source.function.__globals__, **streams})

    def _record_call(self, function: ast.expr) -> None:
        while isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name) and function.value.id == "self":
                self.calls.append((self._tick(), function.attr))
                return
            function = function.value

    def _use(self, stream: Stream, kind: str, node: ast.AST, **details: Any) -> Use:
        if kind != "alias" and stream in self._taken:
            where = self._taken[stream]
            if where in self._decisions.maps:
                self._fail(f"The residual stream is used again after {self.source.at(where)}.")
            else:
                self._decisions.reads.add(where)
                raise _Revised
        use = Use(kind, node, stream, self._path, self._tick(), **details)
        stream.uses.append(use)
        return use

    def _new_stream(self, joins: list[tuple[list[Any], Stream]] | None = None, origin: Use | None = None) -> Stream:
        stream = Stream(joins=joins or [], origin=origin)
        self.streams.append(stream)
        return stream

    def _fail(self, message: str) -> None:
        self.failure = self.failure or message

    def _tick(self) -> int:
        self._order += 1
        return self._order


def _is_helper(target: Any, source: MethodSource) -> bool:
    """Whether a name stands for a plain function of the same file."""
    return isinstance(target, types.FunctionType) and target.__globals__ is source.function.__globals__


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _terms(node.left) + _terms(node.right)
    return [node]
