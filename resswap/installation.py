"""Put connections into a model whose rewritten classes are known, and load such a model without losing a parameter.

This file travels with saved models: it imports nothing but the standard library, torch and transformers.
"""

import ast
import hashlib
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from resswap.configuration import described_dtype, described_scheme
from resswap.errors import CheckpointError, ResswapError, UnsupportedModelError
from resswap.schemes.base import Connection, ResidualModule
from resswap.surgery import EXPAND, READOUT


@dataclass(frozen=True)
class Part:
    """How one module of the stack is converted.

    Attributes:
        classes: the new class of the module (key "") and of modules inside it (by their names in it).
        connections: the names of the connections in it, in the order in which they run.
    """

    classes: dict[str, type[nn.Module]]
    connections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conversion:
    """How a stack of layers is converted: the module that owns it, the name of its list of layers, and each layer."""

    owner: Part
    list_name: str
    layers: tuple[Part, ...]


class ConvertedModel:
    """Mixed into a family's model class: builds the plain model and installs the connections in it."""

    @staticmethod
    def conversion() -> Conversion:
        """What there is to install."""
        raise NotImplementedError

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        install(self, self.conversion())

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As the family's, but no parameter may be missing, left over, or of another shape."""
        return load_checked(super().from_pretrained, *args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As the family's, with the parameters under their own names."""
        kwargs.setdefault("save_original_format", False)  # a renaming of `.mlp.` catches `mlp_connection`
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: its parameters are named, stored and initialised as the family's."""
        return False


def install(model: PreTrainedModel, conversion: Conversion) -> None:
    """Give a freshly built plain model its new classes and, as `model.config.residual` says, its connections."""
    scheme, param_dtype = described_scheme(model.config.residual), described_dtype(model.config.residual)
    owner = _find_owner(model, conversion.owner.classes[""])
    layers = list(getattr(owner, conversion.list_name))
    if len(layers) != len(conversion.layers):
        raise CheckpointError(
            f"config.json asks for {len(layers)} layers, and modeling_resswap.py describes {len(conversion.layers)}."
        )
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    total, index = sum(len(part.connections) for part in conversion.layers), 0
    with torch.device("cpu"):  # initial values are computed even while the model itself is on the meta device
        for layer, part in zip(layers, conversion.layers, strict=True):
            for name in part.connections:
                parent, _, attribute = name.rpartition(".")
                connection = scheme.connection(index, hidden_size, total)
                layer.get_submodule(parent).add_module(attribute, placed(connection, layer, param_dtype))
                index += 1
        owner.add_module(EXPAND, placed(scheme.expand(hidden_size, total), layers[0], param_dtype))
        owner.add_module(READOUT, placed(scheme.readout(hidden_size, total), layers[-1], param_dtype))
    for module, part in [(owner, conversion.owner), *zip(layers, conversion.layers, strict=True)]:
        for name, new_class in part.classes.items():
            submodule = module.get_submodule(name)
            if not isinstance(submodule, new_class):
                submodule.__class__ = new_class
    if isinstance(owner, PreTrainedModel):
        # transformers looks up what a model can record by its class, and learns it when one is initialised.
        PreTrainedModel.__init__(type(owner).__new__(type(owner)), owner.config)


def _find_owner(model: PreTrainedModel, new_class: type[nn.Module]) -> nn.Module:
    original = new_class.__bases__[-1]
    found = [module for module in model.modules() if isinstance(module, new_class) or type(module) is original]
    if len(found) > 1:
        decoder = set(model.get_decoder().modules())
        found = [module for module in found if module in decoder]
    if len(found) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} has {len(found)} modules {original.__name__}, not one.")
    return found[0]


def placed(module: nn.Module, layer: nn.Module, param_dtype: torch.dtype | None) -> nn.Module:
    """The module on the device and in the mode of the layer it serves.

    Args:
        module: a new module.
        layer: a layer of the model.
        param_dtype: the dtype that the parameters take and keep. None: that of the layer's parameters, now and later.
    """
    like = next((p for p in layer.parameters() if p.is_floating_point() and p.dtype.itemsize > 1), None)
    device = None if like is None else like.device
    dtype = param_dtype or (torch.get_default_dtype() if like is None else like.dtype)
    module = module.to(device=device, dtype=dtype).train(layer.training)
    if isinstance(module, ResidualModule):
        module.param_dtype = param_dtype
    return module


def load_checked(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a `from_pretrained`, and refuse what it would repair with random numbers or leave out.

    Raises:
        CheckpointError: a file is damaged, or a tensor is missing, left over, or of another shape than described.
    """
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    wants_info = kwargs.pop("output_loading_info", False)
    may_differ = kwargs.pop("ignore_mismatched_sizes", False)
    try:
        model, info = load(*args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
    except Exception as error:
        damaged = None if isinstance(error, ResswapError) else _damaged_file(path, kwargs)
        if damaged is None:
            raise
        raise CheckpointError(f"{damaged} is damaged or incomplete: {error}") from error
    _check_loaded(model, info, path, may_differ)
    return (model, info) if wants_info else model


def _check_loaded(model: PreTrainedModel, info: Mapping[str, Any], path: Any, may_differ: bool) -> None:
    """A head may be new or left over where another one is asked for; the decoder has to be the one described."""
    added = tuple(f"{name}." for name, module in model.named_modules() if _is_added(name, module))
    same_head = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
    prefix = model.base_model_prefix
    base = model.base_model
    inner = f"{prefix}." if base is not model else ""
    names_in_base = {name for name, _ in base.named_children()} | {prefix}

    for name in sorted(info["missing_keys"]):
        if same_head or name.startswith(inner):
            raise CheckpointError(f"{path}: the weights lack {name}, which config.json asks for.")
    for name in sorted(info["unexpected_keys"]):
        if same_head or name.partition(".")[0] in names_in_base:
            raise CheckpointError(f"{path}: the weights have {name}, which config.json does not ask for.")
    for name, saved, expected in sorted(info["mismatched_keys"], key=lambda key: key[0]):
        if not may_differ or name.startswith(added):
            raise CheckpointError(
                f"{path}: {name} has the shape {tuple(saved)} in the weights, and {tuple(expected)} by config.json."
            )


def _is_added(name: str, module: nn.Module) -> bool:
    return isinstance(module, Connection) or name.rpartition(".")[2] in (EXPAND, READOUT)


def _damaged_file(path: Any, kwargs: Mapping[str, Any]) -> Path | None:
    """The first of a model's files that cannot be read."""
    for file in _weight_files(path, kwargs):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            else:
                load_state_dict(str(file), map_location="meta")
        except Exception:
            return file
    return None


def _weight_files(path: Any, kwargs: Mapping[str, Any]) -> Iterator[Path]:
    if not isinstance(path, (str, os.PathLike)):
        return
    folder = Path(path)
    if not folder.is_dir():
        names = {key: kwargs[key] for key in ("cache_dir", "revision", "token") if key in kwargs}
        config = cached_file(path, "config.json", local_files_only=True, **names)
        folder = Path(config).parent
    folder = folder / kwargs.get("subfolder", "")
    yield from sorted(folder.glob("*.safetensors.index.json"))
    yield from sorted(folder.glob("*.safetensors"))


def check_origins(origins: Mapping[str, str], version: str) -> None:
    """Make sure that the methods that a saved model's code replaces still do what they did when it was written.

    Args:
        origins: `module:Class.method` -> `digest`.
        version: the version of transformers that they were taken from.

    Raises:
        CheckpointError: a method differs in more than comments, annotations or layout.
    """
    for origin, expected in origins.items():
        module, _, name = origin.partition(":")
        try:
            function = importlib.import_module(module)
            for attribute in name.split("."):
                function = getattr(function, attribute)
            same = digest(function) == expected
        except (ImportError, AttributeError):
            same = False
        if not same:
            raise CheckpointError(
                f"modeling_resswap.py was written from transformers {version}, whose {origin} is not that of the "
                f"transformers installed here. Install transformers=={version}; or install and import resswap, which "
                "rewrites the one installed."
            )


def digest(function: Callable[..., Any]) -> str:
    """A digest of what a function does: comments, docstrings, annotations, quotes and layout do not count."""
    source = inspect.getsource(inspect.unwrap(function))
    node = ast.parse(f"class _:\n{source}" if source[:1].isspace() else source).body[0]
    for child in ast.walk(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            child.returns = None
            child.decorator_list = [d for d in child.decorator_list if "docstring" not in ast.unparse(d)]
            if ast.get_docstring(child, clean=False) is not None:
                child.body = child.body[1:] or [ast.Pass()]
        elif isinstance(child, ast.arg):
            child.annotation = None
        elif isinstance(child, ast.AnnAssign):
            child.annotation = ast.Constant(None)
    # What Python versions write differently is left out.
    return hashlib.sha256(re.sub(r"[\s()'\"]", "", ast.unparse(node)).encode()).hexdigest()[:16]
