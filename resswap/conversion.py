"""Convert a model's residual connections, and revert them: all or nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from resswap import surgery
from resswap.auto import register_auto_classes
from resswap.bundle import bundle
from resswap.configuration import (
    Code,
    describe,
    described_dtype,
    described_scheme,
    family_config_class,
    residual_config_class,
)
from resswap.errors import OptionError, ResswapError, UnsupportedModelError
from resswap.installation import placed
from resswap.preconditions import check_convertible, drop_dequantized_flag
from resswap.publishing import hub_id, published_class, unpublished_class
from resswap.schemes import Connection, SchemeConfig, scheme_config

logger = logging.get_logger(__name__)


def convert(
    model: PreTrainedModel, scheme: str = "mhc", *, param_dtype: torch.dtype | None = None, **options: Any
) -> PreTrainedModel:
    """Replace each residual add of a decoder by a connection, in place.

    The model computes the same function straight afterwards (float32 logits to about 1e-6 of their size). Its layers
    and the module that owns them become instances of subclasses of the same name, connections hang on the layers, and
    `model.config.residual` describes the scheme, so that `save_pretrained` and `from_pretrained` keep it.

    Args:
        model: a transformers decoder, with or without a head; not compiled, wrapped or dispatched yet.
        scheme: a key of `resswap.available_schemes()`.
        param_dtype: dtype of the new parameters, which they keep whatever the model is cast to or loaded in. If not
            given, they take that of the layer's own parameters, and follow it. The arithmetic of the coefficients is
            float32 (float64 for a float64 model) in any case.
        options: the scheme's options, fields of the dataclass in `resswap.available_schemes()`.

    Returns:
        The same model.

    Raises:
        OptionError: no such scheme or option, or a value that is not allowed.
        UnsupportedModelError: the model cannot be converted; it is left exactly as it was.
    """
    config = scheme_config(scheme, options)
    if param_dtype is not None and not (param_dtype.is_floating_point and param_dtype.itemsize > 1):
        raise OptionError(f"param_dtype={param_dtype}; allowed: torch.float32, torch.bfloat16 and such.")
    check_convertible(model)
    family = type(model.config)
    register_auto_classes(family, complete)
    _install(model, config, param_dtype)
    model.config.__class__ = residual_config_class(family)
    model.config.residual = describe(config, family.model_type, hub_id(model.config.name_or_path), param_dtype)
    drop_dequantized_flag(model)
    _make_publishable(model, config)
    return model


def complete(model: PreTrainedModel) -> None:
    """Install what `model.config.residual` describes in a freshly built model of the family."""
    if connections(model):
        return
    config = described_scheme(model.config.residual)
    _install(model, config, described_dtype(model.config.residual))
    _make_publishable(model, config)


def _make_publishable(model: PreTrainedModel, config: SchemeConfig) -> None:
    """Give a converted model what it is saved and pushed with: its own code, tags and a model card."""
    model.config._residual_code = _code(model, config)
    model.add_model_tags(["resswap", config.scheme])
    for module in model.modules():
        if module is model or (isinstance(module, PreTrainedModel) and surgery.rewritten_text(type(module))):
            module.__class__ = published_class(type(module))


def _code(model: PreTrainedModel, config: SchemeConfig) -> Code | None:
    try:
        return bundle(model, config)
    except UnsupportedModelError as error:
        logger.warning(f"The model will be saved without code of its own, and load with resswap only: {error}")
        return None


def revert(model: PreTrainedModel, *, discard_trained: bool = False) -> PreTrainedModel:
    """Put the original residual adds back, in place.

    Args:
        model: a converted model.
        discard_trained: also throw connections away whose parameters have changed since conversion; the model then
            computes another function than before.

    Returns:
        The same model, of its original classes.

    Raises:
        UnsupportedModelError: the model is not converted, or its connections are trained and `discard_trained` is
            False.
    """
    if not isinstance(model, nn.Module) or not connections(model):
        raise UnsupportedModelError(f"{type(model).__name__} is not converted: there is nothing to revert.")
    installed = _installed(model)
    if not discard_trained:
        _check_untrained(model, installed)
    model.__class__ = unpublished_class(type(model))
    ours = ("resswap", model.config.residual["scheme"])
    model.model_tags = [tag for tag in model.model_tags or () if tag not in ours] or None
    for module, names in installed.items():
        for name in names:
            delattr(module, name)
        module.__class__ = surgery.original_class(type(module))
    model.config.__class__ = family_config_class(type(model.config))
    del model.config.residual, model.config._residual_code
    return model


def connections(model: nn.Module) -> dict[str, Connection]:
    """The connections of a model by name, in the order of depth; empty if it is not converted."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Connection)}
    return dict(sorted(found.items(), key=lambda item: item[1].index))


def diff(model: nn.Module) -> str:
    """What conversion changed in the source: the unified diff of each rewritten `forward`, one after the other.

    Raises:
        UnsupportedModelError: the model is not converted.
    """
    classes = dict.fromkeys(type(module) for module in model.modules() if surgery.rewritten_text(type(module)))
    if not classes:
        raise UnsupportedModelError(f"{type(model).__name__} is not converted: there is no difference to show.")
    return "\n".join(surgery.source_diff(cls) for cls in classes)


@dataclass(frozen=True)
class _Change:
    """What is to be done to one module: its new class, and the modules to hang on it."""

    module: nn.Module
    new_class: type[nn.Module]
    children: dict[str, nn.Module]


def _install(model: PreTrainedModel, config: SchemeConfig, param_dtype: torch.dtype | None) -> None:
    changes = _plan(model, config, param_dtype)
    with _undone_on_error(changes):
        for change in changes:
            for name, child in change.children.items():
                change.module.add_module(name, child)
            change.module.__class__ = change.new_class
            vars(change.module).pop("forward", None)  # what removed hooks leave behind: the old class's forward


def _plan(model: PreTrainedModel, config: SchemeConfig, param_dtype: torch.dtype | None) -> list[_Change]:
    """Every change, without making any."""
    stack = surgery.find_stack(model)
    layers = [layer for _, layer in stack.layers()]
    if len({id(layer) for layer in layers}) < len(layers):
        raise UnsupportedModelError(f"{type(stack.owner).__name__} runs one layer more than once: not supported.")
    rewrites = [surgery.rewrite_layer(layer, stack.argument) for layer in layers]
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    total = sum(len(rewrite.sites) for rewrite in rewrites)
    changes, index = [], 0
    with torch.device("cpu"):  # initial values are computed even while the model itself is on the meta device
        for layer, rewrite in zip(layers, rewrites, strict=True):
            children = {}
            for site in rewrite.sites:
                children[site] = placed(config.connection(index, hidden_size, total), layer, param_dtype)
                index += 1
            new_class = surgery.subclass_with_forward(type(layer), rewrite.text, surgery.checks_checkpointing)
            changes.append(_Change(layer, new_class, children))
        ends = {
            surgery.EXPAND: placed(config.expand(hidden_size, total), layers[0], param_dtype),
            surgery.READOUT: placed(config.readout(hidden_size, total), layers[-1], param_dtype),
        }
    taken = [name for name in ends if hasattr(stack.owner, name)]
    if taken:
        raise UnsupportedModelError(f"{type(stack.owner).__name__} already has an attribute {taken[0]!r}.")
    new_class = surgery.subclass_with_forward(type(stack.owner), stack.text, surgery.collapses_hidden_states)
    return [*changes, _Change(stack.owner, new_class, ends)]


@contextmanager
def _undone_on_error(changes: list[_Change]) -> Iterator[None]:
    classes = [type(change.module) for change in changes]
    try:
        yield
    except BaseException:
        for change, old_class in zip(changes, classes, strict=True):
            change.module.__class__ = old_class
            for name in change.children:
                change.module._modules.pop(name, None)
        raise


def _installed(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The rewritten modules, with the names of what conversion hung on them."""
    rewritten = [module for module in model.modules() if surgery.rewritten_text(type(module))]
    ends = (surgery.EXPAND, surgery.READOUT)
    return {
        module: [name for name, child in module.named_children() if isinstance(child, Connection) or name in ends]
        for module in rewritten
    }


def _check_untrained(model: PreTrainedModel, installed: dict[nn.Module, list[str]]) -> None:
    config = described_scheme(model.config.residual)
    current = connections(model)
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    fresh = {
        name: config.connection(connection.index, hidden_size, len(current)) for name, connection in current.items()
    }
    readout = next(getattr(module, surgery.READOUT) for module in installed if hasattr(module, surgery.READOUT))
    pairs = [(name, current[name], module) for name, module in fresh.items()]
    pairs.append((surgery.READOUT, readout, config.readout(hidden_size, len(current))))
    for name, module, untrained in pairs:
        for key, value in untrained.state_dict().items():
            parameter = module.state_dict()[key]
            if not torch.equal(parameter, value.to(parameter)):
                raise UnsupportedModelError(
                    f"{name}.{key} has changed since conversion: reverting would throw it away. "
                    "Pass discard_trained=True to do so."
                )


__all__ = ["ResswapError", "complete", "connections", "convert", "diff", "revert"]
