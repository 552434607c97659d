"""Make transformers' Auto classes build converted models."""

from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from resswap.configuration import residual_config_class
from resswap.errors import CheckpointError
from resswap.schemes import ResidualModule


def register_auto_classes(family: type[PreTrainedConfig], complete: Callable[[PreTrainedModel], None]) -> None:
    """Register the converted models of a family with every Auto class that knows its plain models.

    Args:
        family: the family's config class.
        complete: installs in a freshly built plain model what its `config.residual` describes.
    """
    config_class = residual_config_class(family)
    for auto_class in vars(modeling_auto).values():
        if not (isinstance(auto_class, type) and issubclass(auto_class, _BaseAutoModelClass)):
            continue
        mapping = auto_class._model_mapping
        if mapping is None or family not in mapping or config_class in mapping._extra_content:
            continue
        model_class = mapping[family]
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            auto_class.register(config_class, builder(model_class, config_class, complete), exist_ok=True)


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
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super(built, cls).from_pretrained(*args, output_loading_info=True, **kwargs)
        _check_loaded(
            model, set(info["missing_keys"]), args[0] if args else kwargs.get("pretrained_model_name_or_path")
        )
        return (model, info) if wants_info else model

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


def _check_loaded(model: PreTrainedModel, missing: set[str], path: Any) -> None:
    """Parameters of connections that a checkpoint lacks would be used uninitialised."""
    for name, module in model.named_modules():
        if isinstance(module, ResidualModule):
            lost = sorted(missing & {f"{name}.{key}" for key in module.state_dict()})
            if lost:
                raise CheckpointError(f"{path}: the weights lack {lost[0]}, which config.json's residual asks for.")
