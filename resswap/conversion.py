"""Convert a model's residual connections, and revert them: all or nothing."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from resswap import surgery
from resswap.auto import register_auto_classes
from resswap.bundle import bundle
from resswap.changes import made_for_now, make_changes
from resswap.configuration import (
    TOWERS,
    Code,
    describe,
    described_dtype,
    described_scheme,
    described_selection,
    described_towers,
    family_config_class,
    is_parameter_dtype,
    residual_config_class,
)
from resswap.errors import CheckpointError, OptionError, UnsupportedModelError
from resswap.ops import KERNELS
from resswap.planning import plan_conversion
from resswap.preconditions import check_convertible, drop_dequantized_flag
from resswap.publishing import hub_id, published_class, unpublished_class
from resswap.schemes import Connection, ResidualConfig, ResidualModule, SchemeConfig, scheme_config
from resswap.selection import Selection, select

logger = logging.get_logger(__name__)


def convert(
    model: PreTrainedModel,
    scheme: str = "mhc",
    *,
    towers: str = "decoder",
    layers: Iterable[int] | slice | None = None,
    sites: str = "all",
    param_dtype: torch.dtype | None = None,
    kernels: str = "auto",
    **options: Any,
) -> PreTrainedModel:
    """Replace each residual add of a decoder by a connection, in place.

    The model computes the same function straight afterwards (float32 logits to about 1e-6 of their size), unless the
    scheme says `preserves_function=False`: then a warning is logged if the model is pretrained. Its layers
    and the module that owns them become instances of subclasses of the same name, connections hang on the layers, and
    `model.config.residual` describes the scheme, so that `save_pretrained` and `from_pretrained` keep it.

    Args:
        model: a transformers decoder, with or without a head; not compiled, wrapped or dispatched yet.
        scheme: a key of `resswap.available_schemes()`.
        towers: "decoder", or "all" for the encoder of an encoder-decoder as well, with streams of its own from its
            first layer to its last. A model without an encoder beside its decoder refuses "all".
        layers: which layers to convert, as indices (negative ones from the end) or as a slice. The adds of the others
            remain plain residuals, on the scheme's streams: they read the mean of streams or the sum of sources, and
            add to each stream or to the list of sources. The read-out at the end is the scheme's in any case. By
            default all.
        sites: "attention" converts the adds of attention and of whatever else mixes tokens, "mlp" those of all other
            sublayers; where both are parallel, there is one add for either. By default "all".
        param_dtype: dtype of the new parameters, which they keep whatever the model is cast to or loaded in. If not
            given, they take that of the layer's own parameters, and follow it. The arithmetic of the coefficients is
            float32 (float64 for a float64 model) in any case.
        kernels: how the inner loops of the connections run, see `set_kernels`.
        options: the scheme's options, fields of the dataclass in `resswap.available_schemes()`.

    Returns:
        The same model.

    Raises:
        OptionError: no such scheme, option, layer or site, or a value that is not allowed.
        UnsupportedModelError: the model cannot be converted; it is left exactly as it was.
    """
    config = scheme_config(scheme, options)
    if param_dtype is not None and not is_parameter_dtype(param_dtype):
        raise OptionError(f"param_dtype={param_dtype!r}; allowed: torch.float32, torch.bfloat16 and such.")
    _check_kernels(kernels)
    if towers not in list(TOWERS):
        raise OptionError(f"towers={towers!r}; allowed: {', '.join(TOWERS)}.")
    check_convertible(model)
    num_layers = 0 if layers is None else len(list(surgery.find_stack(model, "decoder").layers()))
    selection = select(layers, sites, num_layers)
    if not config.preserves_function and model.name_or_path:
        logger.warning(
            f"The scheme {scheme!r} does not preserve what a model computes: {model.name_or_path} was pretrained, and "
            "its weights are of no use after this conversion. It is meant for training from scratch."
        )
    family = type(model.config)
    register_auto_classes(family, complete)
    _install(model, config, param_dtype, towers, selection)
    _give_own_config(model)
    model.config.__class__ = residual_config_class(family)
    base_model = hub_id(model.config.name_or_path)
    model.config.residual = describe(config, family.model_type, base_model, param_dtype, towers, selection)
    drop_dequantized_flag(model)
    _make_publishable(model, config)
    return set_kernels(model, kernels)


def set_kernels(model: PreTrainedModel, kernels: str) -> PreTrainedModel:
    """Choose how the inner loops of a converted model's connections run; a loaded model starts with "auto".

    Args:
        model: a converted model.
        kernels: "eager" runs single torch operations; "compile" fuses them with torch.compile: the first steps wait
            for the compiler, and without one that works, a warning says so and they run eagerly; "auto" compiles on
            CUDA and is eager elsewhere. Under torch.compile of the whole model the choice makes no difference.

    Returns:
        The same model.

    Raises:
        OptionError: no such kernels.
        UnsupportedModelError: the model is not converted.
    """
    _check_kernels(kernels)
    if not connections(model):
        raise UnsupportedModelError(f"{type(model).__name__} is not converted: it has no kernels to choose.")
    for module in model.modules():
        if isinstance(module, ResidualModule):
            module.kernels = kernels
    return model


def _check_kernels(kernels: str) -> None:
    if kernels not in KERNELS:
        raise OptionError(f"kernels={kernels!r}; allowed: {', '.join(KERNELS)}.")


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
    if connections(model):
        return
    _install_described(model, model.config.residual)
    _make_publishable(model, described_scheme(model.config.residual))


def _make_publishable(model: PreTrainedModel, config: SchemeConfig) -> None:
    """Give a converted model what it is saved and pushed with: its own code, tags and a model card."""
    model.config._residual_code = _code(model, config)
    model.add_model_tags(["resswap", config.scheme])
    for module in model.modules():
        if module is model or (
            isinstance(module, PreTrainedModel) and surgery.rewritten_methods(type(module)) is not None
        ):
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
        _check_untrained(model)
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
    """The connections of a model.

    At adds that `layers` or `sites` left out they are plain residuals, with `swapped` False and without parameters.

    Args:
        model: a converted or a plain model, also wrapped.

    Returns:
        Name → connection, in the order of depth, an encoder's first; empty if the model is not converted.

    Raises:
        UnsupportedModelError: it is no model.
    """
    _check_is_module(model)
    found = {name: module for name, module in model.named_modules() if isinstance(module, Connection)}
    return dict(sorted(found.items(), key=lambda item: (item[1].tower == "decoder", item[1].index)))


def diff(model: nn.Module) -> str:
    """What conversion changed in the source.

    Args:
        model: a converted model.

    Returns:
        The unified diff of each rewritten `forward`, one after the other.

    Raises:
        UnsupportedModelError: the model is not converted.
    """
    _check_is_module(model)
    classes = dict.fromkeys(type(module) for module in model.modules() if surgery.rewritten_methods(type(module)))
    if not classes:
        raise UnsupportedModelError(f"{type(model).__name__} is not converted: there is no difference to show.")
    return "\n".join(surgery.source_diff(cls) for cls in classes)


def _check_is_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} is not a model.")


def _install_described(model: PreTrainedModel, residual: dict[str, Any]) -> None:
    """Install what a `config.residual` describes."""
    config, selection = described_scheme(residual), described_selection(residual)
    try:
        _install(model, config, described_dtype(residual), described_towers(residual), selection)
    except OptionError as error:
        raise CheckpointError(f"config.json: residual does not fit the model: {error}") from error


@contextmanager
def plain_connections(model: PreTrainedModel) -> Iterator[None]:
    """Within the context a plain model has connections that are its residual adds, so that they can be watched.

    Nothing is computed that was not computed before; the sum of parallel branches may be added up in another order.

    Raises:
        UnsupportedModelError: the model's residual adds cannot be found; it is left exactly as it was.
    """
    check_convertible(model)
    changes = plan_conversion(model, ResidualConfig(), None, TOWERS["decoder"], Selection())
    with made_for_now(changes):
        yield


def _install(
    model: PreTrainedModel, config: SchemeConfig, param_dtype: torch.dtype | None, towers: str, selection: Selection
) -> None:
    make_changes(plan_conversion(model, config, param_dtype, TOWERS[towers], selection))


def _installed(model: nn.Module) -> dict[nn.Module, list[str]]:
    """The rewritten modules, with the names of what conversion hung on them."""
    rewritten = [module for module in model.modules() if surgery.rewritten_methods(type(module)) is not None]
    return {
        module: [name for name, child in module.named_children() if isinstance(child, ResidualModule)]
        for module in rewritten
    }


def _check_untrained(model: PreTrainedModel) -> None:
    """Compare every new parameter with that of a fresh conversion of the same model."""
    residual = model.config.residual
    untouched = copy.deepcopy(model)
    revert(untouched, discard_trained=True)
    _install_described(untouched, residual)
    fresh = dict(untouched.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, ResidualModule):
            for key, value in module.named_parameters():
                if not torch.equal(value, fresh[name].get_parameter(key).to(value)):
                    raise UnsupportedModelError(
                        f"{name}.{key} has changed since conversion: reverting would throw it away. "
                        "Pass discard_trained=True to do so."
                    )
