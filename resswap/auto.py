"""Make transformers' Auto classes build converted models."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from resswap.configuration import residual_config_class
from resswap.loading import load_checked


def register_auto_classes(family: type[PreTrainedConfig], complete: Callable[[PreTrainedModel], None]) -> None:
    """Register the converted models of a family with every Auto class that knows its plain models.

    Args:
        family: the family's config class.
        complete: installs in a freshly built plain model what its `config.residual` describes.
    """
    config_class = residual_config_class(family)
    for auto_class, model_class in model_classes(family).items():
        if config_class not in auto_class._model_mapping._extra_content:
            auto_class.register(config_class, builder(model_class, config_class, complete), exist_ok=True)


@cache
def model_classes(family: type[PreTrainedConfig]) -> dict[type[_BaseAutoModelClass], type[PreTrainedModel]]:
    """Each Auto class that knows plain models of a family, with the model class it stands for."""
    found = {}
    for auto_class in vars(modeling_auto).values():
        if isinstance(auto_class, type) and issubclass(auto_class, _BaseAutoModelClass):
            mapping = auto_class._model_mapping
            model_class = mapping[family] if mapping is not None and family in mapping else None
            if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
                found[auto_class] = model_class
    causal = _causal_model(family)
    if causal is not None:
        found.setdefault(AutoModelForCausalLM, causal)
    return found


def _causal_model(family: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """The causal language model of a family, which no Auto class may know: that of the text decoder of a composite."""
    try:
        module = importlib.import_module(family.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return None
    names = (name for name in vars(module) if name.endswith("ForCausalLM"))
    classes = [getattr(module, name) for name in names]
    found = [cls for cls in classes if getattr(cls, "config_class", None) is family]
    return found[0] if len(found) == 1 else None


@cache
def builder(
    model_class: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    complete: Callable[[PreTrainedModel], None],
) -> type[PreTrainedModel]:
    """A subclass of a family's model class that builds converted models; what it builds is of `model_class` itself."""

    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        self.__class__ = model_class
        model_class.__init__(self, config, *args, **kwargs)
        complete(self)

    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        return load_checked(super(built, cls).from_pretrained, *args, **kwargs)

    members = {
        "__module__": __name__,
        "__qualname__": model_class.__qualname__,
        "__doc__": model_class.__doc__,
        "__init__": __init__,
        "from_pretrained": classmethod(from_pretrained),
        "config_class": config_class,
    }
    built = type(model_class)(model_class.__name__, (model_class,), members)
    return built
