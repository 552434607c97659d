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
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from resswap.errors import UnsupportedModelError


class MethodSource:
    """The text and the syntax tree of a class's `forward`, without the wrappers that decorators put around it.

    Attributes:
        name: `module.Class.forward`, for messages.
        function: the function as it was written (the innermost of a chain of decorators).
        text: its source, decorators included.
        node: its `ast.FunctionDef`; the columns and lines of all nodes are those of `text`.
    """

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls = cls
        self.function: FunctionType = inspect.unwrap(cls.forward)
        self.name = f"{cls.__module__}.{cls.__qualname__}.forward"
        try:
            lines, self.first_line = inspect.getsourcelines(self.function)
        except (OSError, TypeError) as error:
            raise UnsupportedModelError(
                f"The source of {self.name} cannot be read, so it cannot be rewritten."
            ) from error
        self.text = "".join(lines)
        # A method is indented; a block around it makes it valid without moving a column.
        wrapped = ast.parse("if True:\n" + self.text if self.text[:1].isspace() else self.text)
        if self.text[:1].isspace():
            ast.increment_lineno(wrapped, -1)
            self.node: ast.FunctionDef = wrapped.body[0].body[0]
        else:
            self.node = wrapped.body[0]
        if not isinstance(self.node, ast.FunctionDef):
            raise UnsupportedModelError(f"{self.name} is not a plain method, so it cannot be rewritten.")

    def at(self, node: ast.AST) -> str:
        """Where `node` is in the original file, and its text, for messages."""
        path = self.function.__code__.co_filename
        segment = " ".join((ast.get_source_segment(self.text, node) or "").split())
        return f'{self.name} ({path}, line {self.first_line + node.lineno - 1}): "{segment}"'

    def parameter(self, argument: int | str) -> str:
        """The name of the parameter that a caller reaches by position (not counting `self`) or keyword."""
        names = [parameter.arg for parameter in self.node.args.posonlyargs + self.node.args.args]
        if isinstance(argument, int) and argument + 1 < len(names):
            return names[argument + 1]
        if argument in names:
            return str(argument)
        raise UnsupportedModelError(f"{self.name} has no parameter {argument!r} for the hidden states.")

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

    def apply(self) -> str:
        """The edited text."""
        data = self._data
        # From the end, so that positions stay right; what was asked for first at a place comes first there.
        for start, end, text in reversed(sorted(self._edits, key=lambda edit: edit[:2])):
            data = data[:start] + text.encode() + data[end:]
        return data.decode()

    # ast counts columns in UTF-8 bytes.

    def _start(self, node: ast.AST) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.AST) -> int:
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset


def _without_comments(text: bytes) -> bytes:
    """The same text with blanks for comments, so that positions stay."""
    return re.sub(rb"#[^\n]*", lambda match: b" " * len(match[0]), text)


@cache
def subclass_with_forward(cls: type[nn.Module], text: str, decorator: Callable | None = None) -> type[nn.Module]:
    """A subclass of `cls`, of the same name, whose `forward` is compiled from `text`.

    The same class and text give the same subclass, so that equal layers share it. Decorators in the text are applied
    again; `decorator`, if given, goes around them all. Instances pickle as the original class and the text.

    Args:
        cls: the class whose `forward` is replaced; the text is run in the globals of that `forward`.
        text: the source of the new method, indented as in the class.
        decorator: a function of the compiled `forward`, importable by name.
    """
    original: FunctionType = inspect.unwrap(cls.forward)
    unknown = set(original.__code__.co_freevars) - {"__class__"}
    if unknown:
        raise UnsupportedModelError(f"{cls.__qualname__}.forward is a closure over {sorted(unknown)}: not rewritten.")
    # In a class of the same name, decorators and name mangling see what they saw in the original.
    source = f"class {cls.__name__}:\n{text}"
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    # transformers looks up what model a method belongs to by the folders of its file.
    filename = f"{original.__code__.co_filename}:resswap:{digest}"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    flags = original.__code__.co_flags & __future__.annotations.compiler_flag
    # Names are looked up, and monkeypatches seen, in the module of the original.
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec", flags=flags, dont_inherit=True), original.__globals__, namespace)
    forward = vars(namespace[cls.__name__])["forward"]
    function = inspect.unwrap(forward)
    if "__class__" in function.__code__.co_freevars:  # what `super()` looks at
        cell = function.__closure__[function.__code__.co_freevars.index("__class__")]
        cell.cell_contents = next(base for base in cls.__mro__ if "forward" in vars(base))
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": lambda self, protocol: (_rebuild, (cls, text, decorator), self.__dict__),
        "forward": forward if decorator is None else decorator(forward),
        "_resswap_text": text,
        "_resswap_decorator": staticmethod(decorator) if decorator is not None else None,
    }
    return type(cls)(cls.__name__, (cls,), members)


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `subclass_with_forward` derived `cls` from, or `cls` itself if it was not rewritten."""
    rewritten = [base for base in cls.__mro__ if "_resswap_text" in vars(base)]
    return rewritten[-1].__mro__[1] if rewritten else cls


def rewritten_text(cls: type[nn.Module]) -> str | None:
    """The text that `forward` of a rewritten class was compiled from, None for any other class."""
    return getattr(cls, "_resswap_text", None)


def rewritten_decorator(cls: type[nn.Module]) -> Callable | None:
    """What the `forward` of a rewritten class is wrapped in, besides the decorators in its text."""
    return getattr(cls, "_resswap_decorator", None)


def _rebuild(cls: type[nn.Module], text: str, decorator: Callable | None) -> nn.Module:
    new = subclass_with_forward(cls, text, decorator)
    return new.__new__(new)


def source_diff(cls: type[nn.Module]) -> str:
    """The unified diff from the original `forward` to the one of the rewritten class `cls`."""
    source = MethodSource(original_class(cls))
    before, after = (text.splitlines(keepends=True) for text in (source.text, rewritten_text(cls)))
    lines = difflib.unified_diff(before, after, source.name, f"{source.name} (resswap)", n=2)
    return "".join(lines)
