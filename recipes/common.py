"""What every recipe shares: errors on one line, options on the command line, optional packages."""

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class RecipeError(Exception):
    """Something the user can mend. It is shown as one line, without a stack trace."""


def run(main: Callable[[], None]) -> None:
    """Call `main`; what the user can mend ends the process with one line on stderr and exit status 2."""
    try:
        main()
    except _mendable() as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def _mendable() -> tuple[type[Exception], ...]:
    resswap = sys.modules.get("resswap")  # not imported for its error class alone: report.py starts without torch
    return (RecipeError, resswap.ResswapError) if resswap else (RecipeError,)


def one_line(error: BaseException, limit: int = 400) -> str:
    """The message of `error` on one line, cut after `limit` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def make_folder(name: str) -> Path:
    """The folder, made if it does not exist; asked for before the work whose results go there."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"cannot write to the folder {name}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise RecipeError(f"cannot write to the folder {name}: permission denied")
    return folder


def need(module: str, extra: str = "recipes") -> ModuleType:
    """Import an optional package, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise RecipeError(f"{package} is not installed; run: pip install 'resswap[{extra}]'") from error


def parse_options(text: str | None) -> dict[str, Any]:
    """`"num_streams=4,dynamic=true"` -> `{"num_streams": 4, "dynamic": True}`.

    Values are Python literals; `true`, `false` and `null` work too, and anything else is a string.
    A comma inside brackets does not end a value.
    """
    options = {}
    for item in re.split(r",(?![^\[({]*[])}])", text or ""):
        if not item.strip():
            continue
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name.isidentifier() and equals):
            raise RecipeError(f"cannot read the option {item.strip()!r}; write name=value,name=value")
        options[name] = _parse_value(value)
    return options


def _parse_value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
