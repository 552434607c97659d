"""Walk through the expressions of a method: what each gives, if that is a stream, and how it uses others."""

import ast
import types
from typing import Any

from torch import Tensor, nn

from resswap.errors import UnsupportedModelError

from .source import MethodSource
from .static import STREAM, UNKNOWN, evaluate
from .stream import Conflict, Decisions, NotReturned, Packed, Path, Revised, Stream, Use, Value

# Tensor methods, or functions of torch, that make sense on each stream or source. A clamp keeps float16 from overflow.
MAP_METHODS = set("clamp clone contiguous float half reshape squeeze to type type_as unsqueeze view".split())


class ExpressionWalk:
    """The expressions of one walk, and its books: variables, streams and their uses.

    `calls` are the names of the modules that are called (`self.NAME(...)`), with when they came in the walk.
    """

    def __init__(self, source: MethodSource, module: nn.Module, decisions: Decisions) -> None:
        self.source, self.module = source, module
        self.calls: list[tuple[int, str]] = []
        self.streams: list[Stream] = []
        self.failure: UnsupportedModelError | None = None
        self.unfollowed = ""  # why the last call that takes a stream and returns it could not be followed
        self._decisions = decisions
        self._env: dict[str, Value] = {}
        self._settled: dict[str, Any] = {}  # variables whose one value the instance settles
        self._taken: dict[Stream, ast.AST] = {}  # on this way: the streams that were added to or handed on, and where
        self._path: Path = ()
        self._order = 0

    def _follow(self, source: MethodSource, module: nn.Module, parameter: str) -> Any:
        """The walk through a method that is called."""
        raise NotImplementedError

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
        if isinstance(node, ast.Attribute):
            self._read(node.value, self._value(node.value), of_all=node.attr in ("dtype", "device"))
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
        if all(isinstance(self._evaluate(other), Tensor) for other in others):
            self._fail(f"A parameter is added to the residual stream in {self.source.at(node)}.")
        return self._take(values[found[0]], "add", node, node, operand=term, others=others)

    def _call(self, node: ast.Call) -> Value:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in MAP_METHODS:
            of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch" and node.args
            operand, *arguments = node.args if of_torch else [function.value, *node.args]
            value = self._value(operand)
            for argument in (*arguments, *(keyword.value for keyword in node.keywords)):
                self._read(argument, self._value(argument))
            if isinstance(value, Stream):
                return self._map_or_read(node, operand, value)
            self._read(operand, value)
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

    def _unit(self, node: ast.Call, key: int | str | None) -> Any:
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
            unit = None if source is None else self._follow(source, module, source.parameter(key))
        except NotReturned:
            return None
        except UnsupportedModelError as error:
            self.unfollowed = str(error)
            return None
        return unit if unit is not None and unit.contains_add() else None

    def _callee(self, function: ast.expr) -> tuple[MethodSource | None, nn.Module]:
        if isinstance(function, ast.Name):
            target = self.source.function.__globals__.get(function.id)
            return MethodSource.of_function(target) if _is_helper(target, self.source) else None, self.module
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

    def _read(self, node: ast.AST, value: Value, **details: Any) -> None:
        if isinstance(value, Stream) and isinstance(node, ast.Name):
            self._use(value, "read", node, **details)
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
        return evaluate(node, self.module, {**self.source.function.__globals__, **self._settled, **streams})

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
                raise Revised
        use = Use(kind, node, stream, self._path, self._tick(), **details)
        stream.uses.append(use)
        return use

    def _new_stream(self, joins: list[tuple[list[Any], Stream]] | None = None, origin: Use | None = None) -> Stream:
        stream = Stream(joins=joins or [], origin=origin)
        self.streams.append(stream)
        return stream

    def _fail(self, message: str, kind: type[UnsupportedModelError] = UnsupportedModelError) -> None:
        self.failure = self.failure or kind(message)

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
