"""Convert a model's residual connections, and revert them: all or nothing."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from resswap import surgery
from resswap.auto import register_auto_classes
from resswap.configuration import describe, described_scheme, family_config_class, residual_config_class
from resswap.errors import UnsupportedModelError
from resswap.preconditions import check_convertible, drop_dequantized_flag
from resswap.schemes import Connection, Place, ResidualModule, SchemeConfig, scheme_config


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
        param_dtype: dtype of the new parameters; that of the layer's own parameters if not given. The arithmetic of
            the coefficients is float32 (float64 for a float64 model) in any case.
        options: the scheme's options, fields of the dataclass in `resswap.available_schemes()`.

    Returns:
        The same model.

    Raises:
        OptionError: no such scheme or option, or a value that is not allowed.
        UnsupportedModelError: the model cannot be converted; it is left exactly as it was.
    """
    config = scheme_config(scheme, options)
    check_convertible(model)
    family = type(model.config)
    register_auto_classes(family, complete)
    _install(model, config, param_dtype)
    _give_own_config(model)
    model.config.__class__ = residual_config_class(family)
    model.config.residual = describe(config, family.model_type)
    drop_dequantized_flag(model)
    return model


def _give_own_config(model: PreTrainedModel) -> None:
    """Copy the config for this model: whoever made it may build another model from it, a plain one."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])


def complete(model: PreTrainedModel) -> None:
    """Install what `model.config.residual` describes in a freshly built model of the family."""
    if not connections(model):
        _install(model, described_scheme(model.config.residual), None)


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
        _check_untrained(model)
    for module, names in installed.items():
        for name in names:
            delattr(module, name)
        module.__class__ = surgery.original_class(type(module))
    model.config.__class__ = family_config_class(type(model.config))
    del model.config.residual
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
    classes = dict.fromkeys(type(module) for module in model.modules() if surgery.rewritten_methods(type(module)))
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


def _rewrite_layers(model: PreTrainedModel, stack: surgery.Stack, named: bool) -> list[surgery.Rewrite]:
    rewrites, begins = [], True
    for _, layer in stack.layers():
        rewrites.append(surgery.rewrite_layer(layer, stack.argument, begins, named))
        begins = rewrites[-1].begins
    return rewrites


def _names_survive(model: PreTrainedModel, rewrites: list[surgery.Rewrite]) -> bool:
    """Whether new parameters keep their names when they are saved and loaded.

    transformers renames weights of some families by patterns, which may match a name that they were not made for.
    """
    names = {module: name for name, module in model.named_modules()}
    keys = [f"{names[site.module]}.{site.name}.weight" for rewrite in rewrites for site in rewrite.sites]
    transforms = get_model_conversion_mapping(model)
    reverses = [transform.reverse_transform() for transform in reversed(transforms)]
    for key in keys:
        renamed = key
        for transform in (*reverses, *transforms):
            renamed, _ = transform.rename_source_key(renamed)
        if renamed != key:
            return False
    return True


def _plan(model: PreTrainedModel, config: SchemeConfig, param_dtype: torch.dtype | None) -> list[_Change]:
    """Every change, without making any."""
    stack = surgery.find_stack(model)
    layers = [layer for _, layer in stack.layers()]
    rewrites = _rewrite_layers(model, stack, named=True)
    if not _names_survive(model, rewrites):
        rewrites = _rewrite_layers(model, stack, named=False)
        if not _names_survive(model, rewrites):
            raise UnsupportedModelError(f"The weight conversions of {type(model).__name__} rename new parameters.")
    modules = [module for rewrite in rewrites for module in rewrite.methods]
    if len(set(modules)) < len(modules):
        raise UnsupportedModelError(f"{type(stack.owner).__name__} runs one layer more than once: not supported.")
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    total = sum(site.kind == "connection" for rewrite in rewrites for site in rewrite.sites)
    new_modules: dict[surgery.Site, nn.Module] = {}
    with torch.device("cpu"):  # initial values are computed even while the model itself is on the meta device
        index = 0
        for layer, rewrite in zip(layers, rewrites, strict=True):
            for site in rewrite.sites:
                if site.kind == "connection":
                    new = config.connection(Place(hidden_size, index, total, site.begins))
                    index += 1
                else:
                    new = config.stream_map(hidden_size, is_norm=site.kind == "norm")
                new_modules[site] = _placed(new, layer, param_dtype)
        ends = {
            surgery.EXPAND: _placed(config.expand(), layers[0], param_dtype),
            surgery.READOUT: _placed(config.readout(hidden_size), layers[-1], param_dtype),
        }
        if stack.maps:
            new_map = config.stream_map(hidden_size, is_norm=stack.maps == "norm")
            ends[surgery.MAP] = _placed(new_map, layers[0], param_dtype)
    taken = [name for name in ends if hasattr(stack.owner, name)]
    if taken:
        raise UnsupportedModelError(f"{type(stack.owner).__name__} already has an attribute {taken[0]!r}.")
    changes = []
    for layer, rewrite in zip(layers, rewrites, strict=True):
        for module, methods in rewrite.methods.items():
            decorator = surgery.checks_checkpointing if module is layer else None
            new_class = surgery.rewritten_class(type(module), tuple(methods.items()), decorator)
            children = {site.name: new_modules[site] for site in rewrite.sites if site.module is module}
            changes.append(_Change(module, new_class, children))
    for module in {stack.owner: None, stack.recorder: None}:
        methods = (("forward", stack.text),) if module is stack.owner else ()
        decorator = surgery.collapses_hidden_states if module is stack.recorder else None
        new_class = surgery.rewritten_class(type(module), methods, decorator)
        changes.append(_Change(module, new_class, ends if module is stack.owner else {}))
    return changes


def _placed(module: nn.Module, layer: nn.Module, param_dtype: torch.dtype | None) -> nn.Module:
    """The module on the device and in the dtype and the mode of the layer it serves."""
    like = next((p for p in layer.parameters() if p.is_floating_point() and p.dtype.itemsize > 1), None)
    device = None if like is None else like.device
    dtype = param_dtype or (torch.get_default_dtype() if like is None else like.dtype)
    return module.to(device=device, dtype=dtype).train(layer.training)


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
    rewritten = [module for module in model.modules() if surgery.rewritten_methods(type(module)) is not None]
    return {
        module: [name for name, child in module.named_children() if isinstance(child, ResidualModule)]
        for module in rewritten
    }


def _check_untrained(model: PreTrainedModel) -> None:
    """Compare every new parameter with that of a fresh conversion of the same model."""
    untouched = copy.deepcopy(model)
    revert(untouched, discard_trained=True)
    _install(untouched, described_scheme(model.config.residual), None)
    fresh = dict(untouched.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, ResidualModule):
            for key, value in module.named_parameters():
                if not torch.equal(value, fresh[name].get_parameter(key).to(value)):
                    raise UnsupportedModelError(
                        f"{name}.{key} has changed since conversion: reverting would throw it away. "
                        "Pass discard_trained=True to do so."
                    )
