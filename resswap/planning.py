"""Plan a conversion: what changes in a model, before anything is changed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from resswap import surgery
from resswap.errors import UnsupportedModelError
from resswap.installation import Slot, modules_of_layers, modules_of_owner
from resswap.schemes import SchemeConfig


@dataclass(frozen=True)
class Change:
    """What is to be done to one module: its new class, and the modules to hang on it."""

    module: nn.Module
    new_class: type[nn.Module]
    children: dict[str, nn.Module]


def plan_conversion(
    model: PreTrainedModel, config: SchemeConfig, param_dtype: torch.dtype | None, towers: Sequence[str]
) -> list[Change]:
    """Every change that converts the `towers` of a model, without making any.

    Raises:
        UnsupportedModelError: the model cannot be converted.
    """
    changes: list[Change] = []
    for tower in towers:
        stack = surgery.find_stack(model, tower)
        changes += _plan_tower(model, stack, config, param_dtype, tower)
    if len({change.module for change in changes}) < len(changes):
        raise UnsupportedModelError(f"The towers of {type(model).__name__} share modules: convert the decoder alone.")
    return changes


def _plan_tower(
    model: PreTrainedModel, stack: surgery.Stack, config: SchemeConfig, param_dtype: torch.dtype | None, tower: str
) -> list[Change]:
    layers = [layer for _, layer in stack.layers()]
    rewrites = _rewrite_layers(model, stack, named=True)
    if not _names_survive(model, rewrites):
        rewrites = _rewrite_layers(model, stack, named=False)
        if not _names_survive(model, rewrites):
            raise UnsupportedModelError(f"The weight conversions of {type(model).__name__} rename new parameters.")
    modules = [module for rewrite in rewrites for module in rewrite.methods]
    if len(set(modules)) < len(modules):
        raise UnsupportedModelError(f"{type(stack.owner).__name__} runs one layer more than once: not supported.")
    hidden_size = stack.recorder.config.get_text_config(decoder=True).hidden_size
    slots = [[Slot(site.name, site.kind, site.begins) for site in rewrite.sites] for rewrite in rewrites]
    made = modules_of_layers(config, hidden_size, layers, slots, param_dtype)
    ends = modules_of_owner(config, hidden_size, layers, stack.maps, param_dtype)
    for new in (*ends.values(), *(module for of_layer in made for module in of_layer)):
        new.tower = tower
    taken = [name for name in ends if hasattr(stack.owner, name)]
    if taken:
        raise UnsupportedModelError(f"{type(stack.owner).__name__} already has an attribute {taken[0]!r}.")
    changes = []
    for layer, rewrite, new_modules in zip(layers, rewrites, made, strict=True):
        placed = list(zip(rewrite.sites, new_modules, strict=True))
        for module, methods in rewrite.methods.items():
            decorator = surgery.checks_checkpointing if module is layer else None
            new_class = surgery.rewritten_class(type(module), tuple(methods.items()), decorator)
            children = {site.name: new for site, new in placed if site.module is module}
            changes.append(Change(module, new_class, children))
    for module in {stack.owner: None, stack.recorder: None}:
        methods = (("forward", stack.text),) if module is stack.owner else ()
        decorator = surgery.collapses_hidden_states if module is stack.recorder else None
        new_class = surgery.rewritten_class(type(module), methods, decorator)
        changes.append(Change(module, new_class, ends if module is stack.owner else {}))
    return changes


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
