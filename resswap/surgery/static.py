"""Decide the conditions that depend on the instance alone (`if self.flag`), leaving the rest open."""

import ast
import operator
from typing import Any

from torch import Tensor, nn

UNKNOWN = object()
"""What `evaluate` returns for an expression whose value the instance alone does not settle."""

STREAM = object()
"""What stands for a variable that holds a stream: nothing is known of it but that it is not None."""

# These change after conversion; BigBird switches its attention type with the length of the input.
_CHANGING = {"training", "gradient_checkpointing", "attention_type"}

_CONTAINERS = (list, tuple, dict, nn.ModuleList, nn.ModuleDict, nn.Sequential)

_COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


def evaluate(node: ast.expr, instance: nn.Module, scope: dict[str, Any]) -> Any:
    """The value of an expression over constants, attributes of `self` and types, or `UNKNOWN`.

    Nothing but attribute look-ups, comparisons, `hasattr`, `getattr` and `isinstance` is carried out.

    Args:
        node: the expression.
        instance: what `self` stands for.
        scope: the globals of the method, in which the names of types are looked up.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id == "self":
            return instance
        value = scope.get(node.id, UNKNOWN)
        return value if value is STREAM or isinstance(value, (type, str, int, float, tuple, frozenset)) else UNKNOWN
    if isinstance(node, ast.Attribute):
        return _attribute(evaluate(node.value, instance, scope), node.attr)
    if isinstance(node, ast.Subscript):
        container, index = (evaluate(part, instance, scope) for part in (node.value, node.slice))
        try:
            return container[index] if isinstance(container, _CONTAINERS) else UNKNOWN
        except (KeyError, IndexError, TypeError):
            return UNKNOWN
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        values = [evaluate(element, instance, scope) for element in node.elts]
        return UNKNOWN if any(value is UNKNOWN for value in values) else values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = evaluate(node.operand, instance, scope)
        return UNKNOWN if value is UNKNOWN else not value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = evaluate(node.operand, instance, scope)
        return -value if isinstance(value, (int, float)) else UNKNOWN
    if isinstance(node, ast.BoolOp):
        return _bool_op(node, instance, scope)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        left, right = (evaluate(side, instance, scope) for side in (node.left, node.comparators[0]))
        if left is UNKNOWN or right is UNKNOWN:
            return UNKNOWN
        if (left is STREAM or right is STREAM) and not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return UNKNOWN
        try:
            return _COMPARISONS[type(node.ops[0])](left, right)
        except TypeError:
            return UNKNOWN
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _call(node.func.id, [evaluate(argument, instance, scope) for argument in node.args])
    return UNKNOWN


def _attribute(owner: Any, name: str) -> Any:
    if owner is UNKNOWN or owner is STREAM or isinstance(owner, Tensor) or name in _CHANGING:
        return UNKNOWN
    return getattr(owner, name, UNKNOWN)


def _bool_op(node: ast.BoolOp, instance: nn.Module, scope: dict[str, Any]) -> Any:
    deciding = isinstance(node.op, ast.Or)
    values = [evaluate(part, instance, scope) for part in node.values]
    if any(value is not UNKNOWN and bool(value) is deciding for value in values):
        return deciding
    return UNKNOWN if any(value is UNKNOWN for value in values) else not deciding


def _call(function: str, arguments: list[Any]) -> Any:
    if any(argument is UNKNOWN or argument is STREAM for argument in arguments):
        return UNKNOWN
    if function == "hasattr" and len(arguments) == 2:
        return hasattr(*arguments)
    if function == "getattr" and len(arguments) in (2, 3):
        return UNKNOWN if arguments[1] in _CHANGING else getattr(*arguments[:2], *(arguments[2:] or [UNKNOWN]))
    if function == "isinstance" and len(arguments) == 2:
        return isinstance(*arguments)
    return UNKNOWN
