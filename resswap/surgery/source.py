"""Read the source of a method, edit it at exact positions, and compile the result into a subclass.

Edits are made to the text, at the positions that `ast` gives, so that comments and layout survive.
"""

import __future__

import ast
import difflib
import hashlib
import inspect
import linecache
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import cache, cached_property
from types import FunctionType
from typing import Any

from torch import nn

from resswap.errors import UnsupportedModelError

INDENT = "    "


class MethodSource:
    """The text and the syntax tree of a method, without the wrappers that decorators put around it.

    Attributes:
        name: `module.Class.method`, for messages.
        function: the function as it was written (the innermost of a chain of decorators).
        text: its source, decorators included.
        node: its `ast.FunctionDef`; the columns and lines of all nodes are those of `text`.
        offset: how many of the parameters a caller does not pass: 1 for `self`, 0 for a plain function.
    """

    def __init__(self, cls: type[nn.Module], method: str = "forward") -> None:
        self._read(inspect.unwrap(getattr(cls, method)), f"{cls.__module__}.{cls.__qualname__}.{method}", offset=1)

    @classmethod
    def of_function(cls, function: FunctionType) -> "MethodSource":
        """The source of a plain function."""
        source = cls.__new__(cls)
        source._read(inspect.unwrap(function), f"{function.__module__}.{function.__qualname__}", offset=0)
        return source

    def _read(self, function: FunctionType, name: str, offset: int) -> None:
        self.function, self.name, self.offset = function, name, offset
        try:
            lines, self.first_line = inspect.getsourcelines(function)
        except (OSError, TypeError) as error:
            raise UnsupportedModelError(f"The source of {name} cannot be read, so it cannot be rewritten.") from error
        self.text = "".join(lines)
        # A method is indented; a block around it makes it valid without moving a column.
        indented = self.text[:1].isspace()
        tree = ast.parse("if True:\n" + self.text if indented else self.text)
        if indented:
            ast.increment_lineno(tree, -1)
        self.node: ast.FunctionDef = tree.body[0].body[0] if indented else tree.body[0]
        if not isinstance(self.node, ast.FunctionDef):
            raise UnsupportedModelError(f"{name} is not a plain function, so it cannot be rewritten.")

    @property
    def where(self) -> str:
        """Its name and where it is, for messages."""
        return f"{self.name} ({self.function.__code__.co_filename}, line {self.first_line})"

    def at(self, node: ast.AST) -> str:
        """Where `node` is in the original file, and its text, for messages."""
        path = self.function.__code__.co_filename
        segment = " ".join((ast.get_source_segment(self.text, node) or "").split())
        return f'{self.name} ({path}, line {self.first_line + node.lineno - 1}): "{segment}"'

    def segment(self, node: ast.AST) -> str:
        """The text of `node`."""
        return ast.get_source_segment(self.text, node)

    def parameter(self, argument: int | str) -> str:
        """The name of the parameter that a caller reaches by position (not counting `self`) or keyword."""
        arguments = self.node.args
        names = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if isinstance(argument, int) and argument + self.offset < len(names):
            return names[argument + self.offset]
        if argument in names:
            return str(argument)
        raise UnsupportedModelError(f"{self.where} has no parameter {argument!r} for the hidden states.")

    @cached_property
    def assigned_once(self) -> set[str]:
        """The variables that get their value in one place, and are no parameters."""
        nodes = list(ast.walk(self.node))
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        counts = Counter([*stored, *(node.arg for node in nodes if isinstance(node, ast.arg))])
        return {name for name in stored if counts[name] == 1}

    def begins_line(self, statement: ast.stmt) -> bool:
        """Whether a line can be put before the statement: it is the first on its line, and not an `elif`."""
        line = self.text.encode().splitlines()[statement.lineno - 1]
        return not line[: statement.col_offset].strip() and not line[statement.col_offset :].startswith(b"elif")


class Edits:
    """Replacements in a text, collected first and made at once. Positions are those of the original text."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        self._line_starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._edits: list[tuple[int, int, str]] = []

    def replace(self, node: ast.AST, text: str) -> None:
        """Put `text` in the place of `node`."""
        self._edits.append((self._start(node), self._end(node), text))

    def replace_between(self, first: ast.AST, second: ast.AST, text: str) -> None:
        """Put `text` in the place of everything from the start of `first` to the start of `second`."""
        self._edits.append((self._start(first), self._start(second), text))

    def insert_at_start(self, node: ast.AST, text: str) -> None:
        """Put `text` directly before `node`."""
        self._edits.append((self._start(node), self._start(node), text))

    def insert_at_end(self, node: ast.AST, text: str) -> None:
        """Put `text` directly after `node`."""
        self._edits.append((self._end(node), self._end(node), text))

    def remove_term(self, term: ast.AST, others: list[ast.expr]) -> None:
        """Take a term and one plus sign out of a sum of `term` and `others`, but no parenthesis."""
        start, end = self._start(term), self._end(term)
        after = self._data[end : min((self._start(o) for o in others if self._start(o) > start), default=end)]
        before_start = max((self._end(o) for o in others if self._start(o) < start), default=start)
        before = _without_comments(self._data[before_start:start])
        plus = _without_comments(after).find(b"+")
        if plus >= 0 and b")" not in after[:plus]:
            rest = after[plus + 1 :]
            self._edits.append((start, end + plus + 1 + len(rest) - len(rest.lstrip()), ""))
        elif b"+" in before and b"(" not in before[before.rindex(b"+") :]:
            kept = before[: before.rindex(b"+")].rstrip()
            self._edits.append((before_start + len(kept), end, ""))
        else:
            raise UnsupportedModelError(
                f"Parentheses around {self._data[start:end].decode()} stand in the way of the add."
            )

    def insert_before(self, statement: ast.stmt, line: str) -> None:
        """Put a line of its own before `statement`, at its indentation."""
        start = self._line_starts[statement.lineno - 1]
        self._edits.append((start, start, f"{' ' * statement.col_offset}{line}\n"))

    def insert_after(self, statement: ast.stmt, line: str) -> None:
        """Put a line of its own after `statement`, at its indentation."""
        start = self._line_starts[statement.end_lineno]
        self._edits.append((start, start, f"{' ' * statement.col_offset}{line}\n"))

    def map_statement(self, statement: ast.Assign, variable: str, apply: str) -> None:
        """`h = f(h, a)` becomes `h = apply(h, lambda stream: f(stream, a))`, with `variable` for h."""
        names = [n for n in ast.walk(statement.value) if isinstance(n, ast.Name) and n.id == variable]
        for name in names:
            self.replace(name, "stream")
        _, value, _ = self.around(statement.value, statement.value)
        self.replace(statement.value, f"{apply}({variable}, lambda stream: {value})")

    def around(self, node: ast.AST, operand: ast.AST) -> tuple[str, str, str]:
        """What stands in `node` before, in and after `operand`, edited; these edits are then done with."""
        inside = self._take(self._start(operand), self._end(operand))
        before = self._take(self._start(node), self._start(operand))
        return before, inside, self._take(self._end(operand), self._end(node))

    def apply(self) -> str:
        """The edited text."""
        return self._take(0, len(self._data))

    def _take(self, start: int, end: int) -> str:
        taken = [edit for edit in self._edits if start <= edit[0] and edit[1] <= end]
        self._edits = [edit for edit in self._edits if edit not in taken]
        data = self._data[start:end]
        # From the end, so that positions stay right; what was asked for first at a place comes first there.
        for first, last, text in reversed(sorted(taken, key=lambda edit: edit[:2])):
            data = data[: first - start] + text.encode() + data[last - start :]
        return data.decode()

    # ast counts columns in UTF-8 bytes.

    def _start(self, node: ast.AST) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.AST) -> int:
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset


def _without_comments(text: bytes) -> bytes:
    """The same text with blanks for comments, so that positions stay."""
    return re.sub(rb"#[^\n]*", lambda match: b" " * len(match[0]), text)


Methods = tuple[tuple[str, str], ...]
"""Names of methods and their new texts, indented as in a class."""


@cache
def rewritten_class(cls: type[nn.Module], methods: Methods, decorator: Callable | None = None) -> type[nn.Module]:
    """A subclass of `cls`, of the same name, with methods compiled from text.

    The same arguments give the same subclass, so that equal layers share it. Decorators in the texts are applied
    again. Instances pickle as the original class and the texts.

    Args:
        cls: the class whose methods are replaced; the texts are run in the globals of its `forward`.
        methods: the new methods, and static methods for helper functions; none if only `decorator` is wanted.
        decorator: a function of `forward`, importable by name, that goes around it.
    """
    original: FunctionType = inspect.unwrap(cls.forward)
    unknown = set(original.__code__.co_freevars) - {"__class__"}
    if unknown:
        raise UnsupportedModelError(f"{cls.__qualname__}.forward is a closure over {sorted(unknown)}: not rewritten.")
    # In a class of the same name, decorators and name mangling see what they saw in the original.
    source = f"class {cls.__name__}:\n" + "\n".join(text for _, text in methods)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    # transformers looks up what model a method belongs to by the folders and the name of its file.
    filename = f"resswap-{digest}:{original.__code__.co_filename}"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    flags = original.__code__.co_flags & __future__.annotations.compiler_flag
    # Names are looked up, and monkeypatches seen, in the module of the original.
    namespace: dict[str, Any] = {}
    if methods:
        exec(compile(source, filename, "exec", flags=flags, dont_inherit=True), original.__globals__, namespace)
    compiled = {name: vars(namespace[cls.__name__])[name] for name, _ in methods}
    for name, method in compiled.items():
        function = inspect.unwrap(getattr(method, "__func__", method))
        if "__class__" in function.__code__.co_freevars:  # what `super()` looks at
            cell = function.__closure__[function.__code__.co_freevars.index("__class__")]
            cell.cell_contents = next(base for base in cls.__mro__ if name in vars(base))
    if decorator is not None:
        compiled["forward"] = decorator(compiled.get("forward", cls.forward))
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": lambda self, protocol: (_rebuild, (cls, methods, decorator), self.__dict__),
        "_resswap_methods": methods,
        "_resswap_decorator": staticmethod(decorator) if decorator is not None else None,
        **compiled,
    }
    return type(cls)(cls.__name__, (cls,), members)


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `rewritten_class` derived `cls` from, or `cls` itself if it was not rewritten."""
    rewritten = [base for base in cls.__mro__ if "_resswap_methods" in vars(base)]
    return rewritten[-1].__mro__[1] if rewritten else cls


def rewritten_methods(cls: type[nn.Module]) -> Methods | None:
    """The names and texts of the methods that were rewritten in a class, None if it is not a rewritten one."""
    return getattr(cls, "_resswap_methods", None)


def rewritten_decorator(cls: type[nn.Module]) -> Callable | None:
    """What the `forward` of a rewritten class is wrapped in, besides the decorators in its text."""
    return getattr(cls, "_resswap_decorator", None)


def _rebuild(cls: type[nn.Module], methods: Methods, decorator: Callable | None) -> nn.Module:
    new = rewritten_class(cls, methods, decorator)
    return new.__new__(new)


def source_diff(cls: type[nn.Module]) -> str:
    """The unified diff from the original methods to those of the rewritten class `cls`."""
    return "".join(_method_diff(original_class(cls), name, text) for name, text in rewritten_methods(cls))


def _method_diff(original: type[nn.Module], name: str, text: str) -> str:
    if hasattr(original, name):
        source = MethodSource(original, name)
        before = source.text
    else:
        source = MethodSource.of_function(inspect.unwrap(original.forward).__globals__[name])
        before = textwrap.indent(source.text, INDENT)
    lines = (part.splitlines(keepends=True) for part in (before, text))
    return "".join(difflib.unified_diff(*lines, source.name, f"{source.name} (resswap)", n=2))
