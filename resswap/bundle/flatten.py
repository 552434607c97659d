"""Turn modules of a package into flat files that import each other relatively, as transformers' remote code does."""

import ast
import importlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from resswap.errors import UnsupportedModelError

# Of these packages only the definitions that are asked for are taken, not whole files.
_IN_PARTS = ("resswap.surgery",)


def flat_name(module: str) -> str:
    """The name of the flat file for a module: `resswap.ops.streams` is `resswap_ops_streams`."""
    return module.replace(".", "_")


@cache
def flatten(wanted: frozenset[tuple[str, str]], header: str) -> Mapping[str, str]:
    """The flat files that hold some definitions and everything they need.

    Args:
        wanted: (module, name) of each definition.
        header: the comment that each file begins with.

    Returns:
        File name -> text. Imports within the same packages are relative and flat, others are as they were.

    Raises:
        UnsupportedModelError: a module has no source file, or is imported in a way that cannot be made flat.
    """
    names: dict[str, set[str]] = {}
    queue = sorted(wanted)
    packages = {module.partition(".")[0] for module, _ in queue}
    texts: dict[str, str] = {}
    while queue:
        module, name = _resolve(*queue.pop())
        taken = names.setdefault(module, set())
        if name in taken:
            continue
        taken.add(name)
        in_parts = module.startswith(_IN_PARTS)
        if module in texts and not in_parts:
            continue
        texts[module] = _only(_source(module), taken) if in_parts else _source(module)
        for node in _inner_imports(texts[module], module, packages):
            queue += [(_absolute(node, module), alias.name) for alias in node.names]
    return {
        f"{flat_name(module)}.py": f"{header}\n{_with_flat_imports(text, module, packages)}"
        for module, text in sorted(texts.items())
    }


def _source(module: str) -> str:
    try:
        if module == "__main__":  # a script or a notebook, which does more than define a scheme
            raise ImportError
        return Path(importlib.import_module(module).__file__).read_text(encoding="utf-8")
    except (ImportError, OSError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{module} is no module with a file that a saved model could carry: define schemes in a file of their "
            "own, and import it."
        ) from error


def _absolute(node: ast.ImportFrom, module: str) -> str:
    """The module that `from ... import` in `module` (not a package) names."""
    if not node.level:
        return node.module
    package = module.rsplit(".", node.level)[0]
    return f"{package}.{node.module}" if node.module else package


def _resolve(module: str, name: str) -> tuple[str, str]:
    """Where a name that a package re-exports is defined."""
    imported = importlib.import_module(module)
    while hasattr(imported, "__path__"):
        for node in ast.parse(_source(module)).body:
            exported = [alias for alias in getattr(node, "names", ()) if (alias.asname or alias.name) == name]
            if isinstance(node, ast.ImportFrom) and exported:
                module, name = _absolute(node, f"{module}.__init__"), exported[0].name
                break
        else:
            raise UnsupportedModelError(f"{module} imports {name} in a way that cannot be made flat.")
        imported = importlib.import_module(module)
    return module, name


def _inner_imports(text: str, module: str, packages: set[str]) -> list[ast.ImportFrom]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and _absolute(node, module).partition(".")[0] in packages:
            found.append(node)
        elif isinstance(node, ast.Import) and {alias.name.partition(".")[0] for alias in node.names} & packages:
            raise UnsupportedModelError(f"{module}: `{ast.unparse(node)}` cannot be made flat; use `from ... import`.")
    return found


def _with_flat_imports(text: str, module: str, packages: set[str]) -> str:
    lines = text.splitlines(keepends=True)
    for node in sorted(_inner_imports(text, module, packages), key=lambda node: -node.lineno):
        by_file: dict[str, list[str]] = {}
        for alias in node.names:
            target, name = _resolve(_absolute(node, module), alias.name)
            shown = name if (alias.asname or alias.name) == name else f"{name} as {alias.asname or alias.name}"
            by_file.setdefault(flat_name(target), []).append(shown)
        statement = "".join(lines[node.lineno - 1 : node.end_lineno])
        if len(by_file) == 1:
            new = re.sub(r"from\s+\S+", f"from .{next(iter(by_file))}", statement, count=1)
        else:
            indent = " " * node.col_offset
            new = "".join(f"{indent}from .{file} import {', '.join(names)}\n" for file, names in by_file.items())
        lines[node.lineno - 1 : node.end_lineno] = [new]
    return "".join(lines)


def _only(text: str, names: set[str]) -> str:
    """The definitions of some names, and of what they use, out of a module's text."""
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    defined = [(node, _bound(node)) for node in tree.body]
    needed, size = set(names), 0
    while size != len(needed):
        size = len(needed)
        for node, bound in defined:
            if bound & needed and not isinstance(node, (ast.Import, ast.ImportFrom)):
                needed |= {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    imports, rest = [], []
    for node, bound in defined:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] in needed]
            imports += [ast.unparse(node)] if node.names else []
        elif bound & needed:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            rest.append("".join(lines[first - 1 : node.end_lineno]).rstrip())
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(rest) + "\n"


def _bound(node: ast.stmt) -> set[str]:
    """The names that a top-level statement defines."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
