"""Put connections into a model whose rewritten classes are known.

This file travels with saved models: it imports nothing but the standard library, torch and transformers.
"""

import ast
import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from resswap.configuration import described_dtype, described_scheme
from resswap.errors import CheckpointError, OptionError, UnsupportedModelError
from resswap.loading import load_checked
from resswap.schemes.base import Connection, Place, ResidualModule, SchemeConfig
from resswap.surgery import EXPAND, MAP, READOUT


@dataclass(frozen=True)
class Slot:
    """Where a new module goes, and what for.

    Attributes:
        name: its attribute of a layer, or of a module in the layer ("output.connection").
        kind: "connection"; or "norm" or "linear", what a map applies to the streams.
        begins: whether the streams have just begun, at the start of the stack or by a norm.
        swapped: whether the scheme's connection goes there, or the plain residual on the scheme's streams.
    """

    name: str
    kind: str = "connection"
    begins: bool = False
    swapped: bool = True


@dataclass(frozen=True)
class Part:
    """How one module is converted.

    Attributes:
        classes: the new class of the module (key "") and of modules inside it (by their names in it).
        slots: what is new in it, in the order in which it runs.
    """

    classes: dict[str, type[nn.Module]]
    slots: tuple[Slot, ...] = ()


@dataclass(frozen=True)
class Conversion:
    """How a stack of layers is converted.

    Attributes:
        model: the innermost `PreTrainedModel` around the stack, with all that changes outside the layers.
        owner: the name in it of the module that runs the layers; "" if that is the model itself.
        list_name: the owner's attribute that holds the layers.
        layers: how each layer is converted.
        maps: what the owner applies to the streams between layers: "linear", "norm" or nothing ("").
        tower: whether it is the "decoder" or the "encoder" of an encoder-decoder.
    """

    model: Part
    owner: str
    list_name: str
    layers: tuple[Part, ...]
    maps: str = ""
    tower: str = "decoder"


class ConvertedModel:
    """Mixed into a family's model class: builds the plain model and installs the connections in it."""

    @staticmethod
    def conversions() -> tuple[Conversion, ...]:
        """What there is to install, one for each tower."""
        raise NotImplementedError

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for conversion in self.conversions():
            install(self, conversion)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As the family's, but no parameter may be missing, left over, or of another shape."""
        return load_checked(super().from_pretrained, *args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As the family's, with the parameters under their own names."""
        # Trainer and Accelerate load files as they are, without the renamings and mergings of `from_pretrained`.
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: its parameters are named, stored and initialised as the family's."""
        return False


def install(model: PreTrainedModel, conversion: Conversion) -> None:
    """Give a freshly built plain model its new classes and, as `model.config.residual` says, its connections."""
    scheme, param_dtype = described_scheme(model.config.residual), described_dtype(model.config.residual)
    around = _find_model(model, conversion.model.classes[""], conversion.tower)
    owner = around.get_submodule(conversion.owner)
    layers, parts = list(getattr(owner, conversion.list_name)), conversion.layers
    if len(layers) != len(parts):
        raise CheckpointError(
            f"config.json asks for {len(layers)} layers, and modeling_resswap.py describes {len(parts)}."
        )
    hidden_size = around.config.get_text_config(decoder=True).hidden_size
    made = modules_of_layers(scheme, hidden_size, layers, [part.slots for part in parts], param_dtype)
    for layer, part, new_modules in zip(layers, parts, made, strict=True):
        for slot, new in zip(part.slots, new_modules, strict=True):
            parent, _, attribute = slot.name.rpartition(".")
            new.tower = conversion.tower
            layer.get_submodule(parent).add_module(attribute, new)
    for name, new in modules_of_owner(scheme, hidden_size, layers, conversion.maps, param_dtype).items():
        new.tower = conversion.tower
        owner.add_module(name, new)
    for module, part in [(around, conversion.model), *zip(layers, parts, strict=True)]:
        for name, new_class in part.classes.items():
            submodule = module.get_submodule(name)
            if not isinstance(submodule, new_class):
                submodule.__class__ = new_class
    # transformers looks up what a model can record by its class, and learns it when one is initialised.
    PreTrainedModel.__init__(type(around).__new__(type(around)), around.config)


def _find_model(model: PreTrainedModel, new_class: type[nn.Module], tower: str) -> nn.Module:
    original = new_class.__bases__[-1]
    found = [module for module in model.modules() if isinstance(module, new_class) or type(module) is original]
    if len(found) > 1:
        inside = set((model.get_encoder() if tower == "encoder" else model.get_decoder()).modules())
        found = [module for module in found if module in inside]
    if len(found) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} has {len(found)} modules {original.__name__}, not one.")
    return found[0]


def modules_of_layers(
    scheme: SchemeConfig,
    hidden_size: int,
    layers: Sequence[nn.Module],
    slots: Sequence[Sequence[Slot]],
    param_dtype: torch.dtype | None,
) -> list[list[ResidualModule]]:
    """The new modules of each layer, one for each of its slots."""
    total = sum(slot.kind == "connection" for of_layer in slots for slot in of_layer)
    index, made = 0, []
    for depth, (layer, of_layer) in enumerate(zip(layers, slots, strict=True)):
        made.append([])
        last = max((i for i, slot in enumerate(of_layer) if slot.kind == "connection"), default=-1)
        for i, slot in enumerate(of_layer):
            with torch.device("cpu"):  # initial values are computed even while the model is on the meta device
                if slot.kind == "connection":
                    opens_layer = not any(new.kind == "connection" for new in made[-1])
                    place = Place(hidden_size, index, total, slot.begins, depth, opens_layer, i == last)
                    new = scheme.connection(place) if slot.swapped else scheme.plain_connection(place)
                    _check_connection(new, scheme, place)
                    index += 1
                else:
                    new = scheme.stream_map(hidden_size, is_norm=slot.kind == "norm")
            new.kind, new.begins, new.swapped = slot.kind, slot.begins, slot.swapped
            made[-1].append(_placed(new, layer, param_dtype))
    return made


def _check_connection(new: Any, scheme: SchemeConfig, place: Place) -> None:
    name = type(new).__name__
    if not isinstance(new, Connection):
        raise OptionError(
            f"The scheme {scheme.scheme!r}: connection() of {type(scheme).__name__} gives {name}, which is not "
            "derived from resswap.Connection."
        )
    if getattr(new, "index", None) != place.index:
        raise OptionError(
            f"The scheme {scheme.scheme!r}: {name}.index is not {place.index}; its __init__ has to call "
            "super().__init__(place.index)."
        )
    lost = {key for key, _ in new.named_buffers()} - set(new.state_dict())
    if lost:
        raise OptionError(
            f"The scheme {scheme.scheme!r}: the buffer {min(lost)!r} of {name} is not saved, and a loaded model would "
            "have it without its values; make it persistent, or compute it in forward."
        )


def modules_of_owner(
    scheme: SchemeConfig,
    hidden_size: int,
    layers: Sequence[nn.Module],
    maps: str,
    param_dtype: torch.dtype | None,
) -> dict[str, ResidualModule]:
    """The new modules of the module that runs the layers, by name."""
    with torch.device("cpu"):
        made = {EXPAND: scheme.expand(hidden_size), READOUT: scheme.readout(hidden_size, len(layers))}
        if maps:
            made[MAP] = scheme.stream_map(hidden_size, is_norm=maps == "norm")
            made[MAP].kind = maps
    last = {READOUT: layers[-1]}
    return {name: _placed(new, last.get(name, layers[0]), param_dtype) for name, new in made.items()}


def _placed(module: ResidualModule, layer: nn.Module, param_dtype: torch.dtype | None) -> ResidualModule:
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
    module.param_dtype = param_dtype
    return module


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
