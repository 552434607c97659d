"""`config.residual`, the whole description of a conversion, and the configs that carry it.

In memory a converted model's config keeps its family's `model_type` (PEFT, generation and chat tools look it up); in
`config.json` the type is `resswap`, so that a loader that does not know the scheme fails instead of dropping weights.
"""

import dataclasses
from functools import cache
from typing import Any

from transformers import PreTrainedConfig

from resswap.errors import CheckpointError, OptionError
from resswap.schemes import SchemeConfig, scheme_config

MODEL_TYPE = "resswap"
FORMAT_VERSION = 1
# A class that is asked for by name, as in LlamaForCausalLM.from_pretrained, does not look at the model type. It does
# take the name of the weights' file from this field, finds that it is none, and shows it.
_GUARD_FIELD = "transformers_weights"
_GUARD = "(this checkpoint needs resswap: pip install resswap, import resswap, and load it with an Auto class)"


def describe(config: SchemeConfig, base_model_type: str) -> dict[str, Any]:
    """The value of `config.residual` for a scheme and the family it was applied to."""
    return {
        "format_version": FORMAT_VERSION,
        "base_model_type": base_model_type,
        "scheme": config.scheme,
        "options": dataclasses.asdict(config),
    }


def described_scheme(residual: Any) -> SchemeConfig:
    """The scheme that a `config.residual` describes.

    Raises:
        CheckpointError: a field is missing, of the wrong type, or not known to this version of resswap.
    """
    if not isinstance(residual, dict):
        raise CheckpointError(f"config.json: `residual` is {residual!r}, not a description of a residual scheme.")
    for name, kind in {"format_version": int, "base_model_type": str, "scheme": str, "options": dict}.items():
        if not isinstance(residual.get(name), kind):
            raise CheckpointError(f"config.json: residual.{name} is {residual.get(name)!r}, not a {kind.__name__}.")
    if residual["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"config.json: residual.format_version is {residual['format_version']}, newer than the {FORMAT_VERSION} "
            "that this version of resswap reads. Upgrade resswap."
        )
    try:
        return scheme_config(residual["scheme"], residual["options"])
    except OptionError as error:
        raise CheckpointError(f"config.json: residual: {error}") from error


class ResidualConfigMixin:
    """What the config of a converted model adds to its family's. `residual` is the description."""

    residual: dict[str, Any]

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to `config.json`."""
        output = super().to_diff_dict()
        output["model_type"] = MODEL_TYPE
        output[_GUARD_FIELD] = _GUARD
        return output

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_config, (family_config_class(type(self)),), self.__dict__


@cache
def residual_config_class(family: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of converted models of a family, a subclass of the family's."""
    name = f"Residual{family.__name__}"
    members = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": family.__doc__,
        "model_type": family.model_type,
    }
    return type(family)(name, (ResidualConfigMixin, family), members)


def family_config_class(cls: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of the plain models of the family of `cls`."""
    return cls.__mro__[2] if issubclass(cls, ResidualConfigMixin) else cls


def _new_config(family: type[PreTrainedConfig]) -> PreTrainedConfig:
    cls = residual_config_class(family)
    return cls.__new__(cls)


def restored(config_dict: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` says, with the family's model type back in its place."""
    residual = config_dict.get("residual")
    described_scheme(residual)
    output = {**config_dict, "model_type": residual["base_model_type"]}
    output.pop(_GUARD_FIELD, None)
    return output
