"""Write the configuration and the modeling file of a converted model."""

import __future__

import dis
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from itertools import groupby
from types import CodeType, ModuleType
from typing import Any

import transformers
from transformers import PreTrainedModel

from resswap.configuration import residual_config_class
from resswap.errors import UnsupportedModelError
from resswap.installation import digest
from resswap.schemes import SchemeConfig
from resswap.version import __version__

from .flatten import flat_name
from .structure import Rewritten, Structure, Tower

CONFIGURATION, MODELING = "configuration_resswap", "modeling_resswap"
HEADER = f"# From resswap {__version__}. Licensed under the Apache License, Version 2.0."


def configuration_file(family: type, scheme: SchemeConfig, rewritten: Iterable[Rewritten], carried: str) -> str:
    origins = {}
    for cls in rewritten:
        for name, _ in cls.methods:
            function = _replaced(cls.original, name)
            owner = f"{cls.original.__module__}:{cls.original.__qualname__}.{name}"
            helper = f"{function.__module__}:{function.__qualname__}"
            origins[owner if hasattr(cls.original, name) else helper] = digest(function)
    listed = "".join(f'    "{key}": "{value}",\n' for key, value in sorted(origins.items()))
    name = residual_config_class(family).__name__
    return f'''{HEADER}
"""The config of {family.model_type} models whose residual connections are those of the scheme `{scheme.scheme}`."""

from typing import TYPE_CHECKING

from {family.__module__} import {family.__name__}

from .resswap_configuration import ResidualConfigMixin
from .resswap_installation import check_origins
from .{flat_name(type(scheme).__module__)} import {type(scheme).__name__}  # noqa: F401 (makes the scheme known)

{carried}
TRANSFORMERS_VERSION = "{transformers.__version__}"
# The methods that {MODELING}.py replaces, with a digest of what they do in that version.
ORIGINS = {{
{listed}}}


class {name}(ResidualConfigMixin, {family.__name__}):
    model_type = "{family.model_type}"

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        check_origins(ORIGINS, TRANSFORMERS_VERSION)
        return super().from_dict(config_dict, **kwargs)
'''


def modeling_file(
    family: type,
    scheme: SchemeConfig,
    structure: Structure,
    heads: dict[str, type[PreTrainedModel]],
    carried: str,
) -> str:
    rewritten = sorted(structure.classes, key=lambda cls: issubclass(cls.original, PreTrainedModel))  # layers first
    imports = _Imports()
    bodies = [_class_text(cls, imports) for cls in rewritten]
    named = {cls.original for cls in rewritten}
    for head in sorted(set(heads.values()) - named, key=lambda cls: cls.__name__):
        bodies.append(f"class {head.__name__}(Converted, {imports.module(head)}.{head.__name__}):\n    pass\n")
    decorators = sorted({cls.decorator for cls in rewritten} - {None}, key=lambda function: function.__name__)
    own = [f"from .{CONFIGURATION} import {residual_config_class(family).__name__}"]
    own.append("from .resswap_installation import Conversion, ConvertedModel, Part, Slot")
    own += [f"from .{flat_name(d.__module__)} import {d.__name__}" for d in decorators]
    parts = dict.fromkeys(part for tower in structure.towers for part in tower.layers)
    names = {part: f"layer_{index}" for index, part in enumerate(parts, 1)}
    definitions = [f"        {name} = {part}\n" for part, name in names.items()]
    origin = sys.modules[rewritten[-1].original.__module__]
    return f'''{_notice(origin)}
#
# Changed by resswap {__version__}, from transformers {transformers.__version__}: each residual add is a connection.
"""{family.model_type} models whose residual connections are those of the scheme `{scheme.scheme}`."""

{imports.text()}

{chr(10).join(sorted(own))}

{carried}

class Converted(ConvertedModel):
    config_class = {residual_config_class(family).__name__}

    @staticmethod
    def conversions():
{"".join(definitions)}        return (
{"".join(_conversion(tower, names) for tower in structure.towers)}        )


{(chr(10) * 2).join(bodies)}'''


def _conversion(tower: Tower, names: dict[str, str]) -> str:
    """The expression for the conversion of one tower, with names for the parts that layers are."""
    runs = [(names[part], len(list(run))) for part, run in groupby(tower.layers)]
    layers = " ".join(f"*[{name}] * {count}," for name, count in runs)
    return f'''            Conversion(
                model={textwrap.indent(tower.model, " " * 8).strip()},
                owner="{tower.owner}",
                list_name="{tower.list_name}",
                layers=({layers}),
                maps="{tower.maps}",
                tower="{tower.tower}",
            ),
'''


def carried_files(files: Iterable[str]) -> str:
    """Statements for the two files that transformers looks at."""
    lines = "".join(f"    from .{name.removesuffix('.py')} import *  # noqa: F403\n" for name in sorted(files))
    return f"if TYPE_CHECKING:  # not all versions of transformers follow the imports of imported files\n{lines}"


def _class_text(cls: Rewritten, imports: "_Imports") -> str:
    """The subclass of the family's class, with its rewritten methods as they are."""
    mixin = "Converted, " if issubclass(cls.original, PreTrainedModel) else ""
    bases = f"{mixin}{imports.module(cls.original)}.{cls.original.__name__}"
    lines = []
    for name, text in cls.methods:
        function = _replaced(cls.original, name)
        if hasattr(cls.original, name):
            holder = next(base for base in cls.original.__mro__ if name in vars(base))
            text = re.sub(r"\bsuper\(\)", f"super({imports.module(holder)}.{holder.__name__}, self)", text)
        imports.add(text, function)
        if not re.match(r"    \S", text):  # from a class in an `if`
            text = textwrap.indent(textwrap.dedent(text), "    ")
        wrapped = f"    @{cls.decorator.__name__}\n" if cls.decorator is not None and name == "forward" else ""
        lines.append(wrapped + text.rstrip() + "\n")
    if cls.decorator is not None and "forward" not in dict(cls.methods):
        original = f"{imports.module(cls.original)}.{cls.original.__name__}.forward"
        lines.append(f"    forward = {cls.decorator.__name__}({original})\n")
    renamed = "" if cls.name == cls.original.__name__ else f'\n\n{cls.name}.__name__ = "{cls.original.__name__}"\n'
    return f"class {cls.name}({bases}):\n" + "\n".join(lines) + renamed


def _replaced(original: type, name: str) -> Callable[..., Any]:
    """What a method was rewritten from: a method of its class, or a helper function that its class calls."""
    if hasattr(original, name):
        return inspect.unwrap(getattr(original, name))
    return inspect.unwrap(inspect.unwrap(original.forward).__globals__[name])


class _Imports:
    """The imports of names that methods find in the modules they were written in."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._names: dict[str, tuple[str, Any]] = {}
        self.future = False  # whether annotations are not evaluated where the methods come from

    def module(self, cls: type) -> str:
        """The name under which the module of a class is imported."""
        self._modules.add(cls.__module__)
        return cls.__module__.rpartition(".")[2]

    def add(self, text: str, function: Callable[..., Any]) -> None:
        """Import what the method with this text looks up in the module of `function`."""
        flags = function.__code__.co_flags & __future__.annotations.compiler_flag
        self.future |= bool(flags)
        for name in sorted(_global_names(text, flags) & set(function.__globals__)):
            value = function.__globals__[name]
            home, known = self._names.setdefault(name, (function.__globals__["__name__"], value))
            if known is not value:
                raise UnsupportedModelError(f"{name} is one thing in {home} and another in {function.__module__}.")

    def text(self) -> str:
        """The import statements."""
        plain, by_module = [], {}
        for name, (home, value) in self._names.items():
            if isinstance(value, ModuleType):
                package, _, last = value.__name__.rpartition(".")
                alias = "" if name == last else f" as {name}"
                plain.append(f"from {package} import {last}{alias}" if package else f"import {last}{alias}")
            else:
                by_module.setdefault(home, []).append(name)
        for module in self._modules:
            package, _, last = module.rpartition(".")
            plain.append(f"from {package} import {last}")
        for home, names in by_module.items():
            plain.append(f"from {home} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")")
        future = "from __future__ import annotations\n\n" if self.future else ""
        plain.sort(key=lambda line: (line.startswith("from "), line))
        return f"{future}from typing import TYPE_CHECKING\n\n" + "\n".join(plain)


def _global_names(text: str, flags: int) -> set[str]:
    names, codes = set(), [compile(f"class _:\n{text}", "<text>", "exec", flags=flags, dont_inherit=True)]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names |= {i.argval for i in dis.get_instructions(code) if i.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME"))}
    return {name for name in names if not name.startswith("__")}


def _notice(module: ModuleType) -> str:
    """The license notice at the top of a module's file."""
    lines = inspect.getsource(module).splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line)
    start = next((i for i, line in enumerate(comment) if "Copyright" in line), None)
    if start is None:
        return "# Copyright The HuggingFace Inc. team. Licensed under the Apache License, Version 2.0."
    return "\n".join(comment[start:])
