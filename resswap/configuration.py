"""`config.residual`, the whole description of a conversion, and the configs that carry it.

In memory a converted model's config keeps its family's `model_type` (PEFT, generation and chat tools look it up); in
`config.json` the type is `resswap`, so that a loader that does not know the scheme fails instead of dropping weights.
This file travels with saved models: it imports nothing but the standard library, torch, transformers and its like.
"""

import dataclasses
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from resswap.errors import CheckpointError, OptionError
from resswap.schemes import SchemeConfig, scheme_config
from resswap.selection import SITES, Selection

MODEL_TYPE = "resswap"
FORMAT_VERSION = 1
# A class that is asked for by name, as in LlamaForCausalLM.from_pretrained, does not look at the model type. It does
# take the name of the weights' file from this field, finds that it is none, and shows it. Tokenizers do not mind.
_GUARD_FIELD = "transformers_weights"
_GUARD = (
    "(this checkpoint needs resswap: pip install resswap, import resswap, and load it with an Auto class; or, to run "
    "the code that it brings along, load it with an Auto class and trust_remote_code=True)"
)
TOWERS = {"decoder": ("decoder",), "all": ("encoder", "decoder")}
"""The values of `towers`, and whose layers each converts, in the order in which they run."""
_REQUIRED = {"format_version": int, "base_model_type": str, "scheme": str, "options": dict}
_OPTIONAL = {"base_model": str, "param_dtype": str, "towers": str, "layers": list, "sites": str}
_CODE = "_residual_code"


@dataclasses.dataclass(frozen=True)
class Code:
    """The code that a saved model brings along: the text of each file, and config.json's `auto_map`."""

    files: dict[str, str]
    auto_map: dict[str, str]


def describe(
    config: SchemeConfig,
    base_model_type: str,
    base_model: str | None = None,
    param_dtype: torch.dtype | None = None,
    towers: str = "decoder",
    selection: Selection | None = None,
) -> dict[str, Any]:
    """The value of `config.residual`.

    Args:
        config: the scheme and its options.
        base_model_type: the family it is applied to.
        base_model: the Hub repository of the model that was converted, if it has one.
        param_dtype: the dtype that the new parameters keep, whatever the model is cast to.
        towers: a key of `TOWERS`.
        selection: which residual adds are swapped. None: all.
    """
    residual = {
        "format_version": FORMAT_VERSION,
        "base_model_type": base_model_type,
        "scheme": config.scheme,
        "options": {name: _json(value) for name, value in dataclasses.asdict(config).items()},
        **({} if selection is None else selection.described()),
    }
    if base_model is not None:
        residual["base_model"] = base_model
    if param_dtype is not None:
        residual["param_dtype"] = str(param_dtype).removeprefix("torch.")
    if towers != "decoder":
        residual["towers"] = towers
    return residual


def described_scheme(residual: Any) -> SchemeConfig:
    """The scheme that a `config.residual` describes.

    Raises:
        CheckpointError: a field is missing, of the wrong type, or not known to this version of resswap.
    """
    if not isinstance(residual, dict):
        raise CheckpointError(f"config.json: `residual` is {residual!r}, not a description of a residual scheme.")
    for name, kind in (_REQUIRED | {key: kind for key, kind in _OPTIONAL.items() if key in residual}).items():
        value = residual.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"config.json: residual.{name} is {value!r}, not a {kind.__name__}.")
    version = residual["format_version"]
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"config.json: residual.format_version is {version}, newer than the {FORMAT_VERSION} that this version "
            "of resswap reads. Upgrade resswap."
        )
    if version < 1:
        raise CheckpointError(f"config.json: residual.format_version is {version}; the first one is 1.")
    unknown = sorted(str(name) for name in residual if name not in _REQUIRED | _OPTIONAL)
    if unknown:
        raise CheckpointError(f"config.json: residual.{unknown[0]} is not a field of format version {version}.")
    described_dtype(residual)
    described_towers(residual)
    described_selection(residual)
    try:
        return scheme_config(residual["scheme"], residual["options"])
    except OptionError as error:
        raise CheckpointError(f"config.json: residual: {error}") from error


def described_dtype(residual: dict[str, Any]) -> torch.dtype | None:
    """The dtype that the new parameters keep; None if they follow the model.

    Raises:
        CheckpointError: it is not a floating dtype of torch.
    """
    name = residual.get("param_dtype")
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not is_parameter_dtype(dtype):
        raise CheckpointError(f"config.json: residual.param_dtype is {name!r}; allowed: float32, bfloat16 and such.")
    return dtype


def described_towers(residual: dict[str, Any]) -> str:
    """Which towers are converted, a key of `TOWERS`.

    Raises:
        CheckpointError: it is none.
    """
    towers = residual.get("towers", "decoder")
    if towers not in TOWERS:
        raise CheckpointError(f"config.json: residual.towers is {towers!r}; allowed: {', '.join(TOWERS)}.")
    return towers


def described_selection(residual: dict[str, Any]) -> Selection:
    """Which residual adds are swapped.

    Raises:
        CheckpointError: `layers` are not ascending indices, or `sites` is no kind of sublayer.
    """
    layers, sites = residual.get("layers"), residual.get("sites", "all")
    ascending = layers is None or (
        all(isinstance(index, int) and not isinstance(index, bool) for index in layers)
        and layers == sorted(set(layers))
        and min(layers, default=-1) >= 0
    )
    if not ascending:
        raise CheckpointError(f"config.json: residual.layers is {layers!r}; allowed: ascending indices of layers.")
    if sites not in SITES:
        raise CheckpointError(f"config.json: residual.sites is {sites!r}; allowed: {', '.join(SITES)}.")
    return Selection(None if layers is None else tuple(layers), sites)


def _json(value: Any) -> Any:
    """A value as it is when it has been read from JSON."""
    return [_json(element) for element in value] if isinstance(value, tuple) else value


def is_parameter_dtype(dtype: Any) -> bool:
    """Whether it is a dtype that parameters can be trained in."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


class ResidualConfigMixin:
    """What the config of a converted model adds to its family's. `residual` is the description."""

    residual: dict[str, Any]

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `config.json` says, and the arguments that are left.

        Raises:
            CheckpointError: `residual` does not describe a scheme that is known here.
        """
        config_dict, unused = super().get_config_dict(*args, **kwargs)
        return (restored(config_dict) if config_dict.get("model_type") == MODEL_TYPE else config_dict), unused

    def to_dict(self) -> dict[str, Any]:
        """The config in memory, without the code that is saved beside it."""
        output = super().to_dict()
        output.pop(_CODE, None)
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to `config.json`."""
        output = super().to_diff_dict()
        output["model_type"] = MODEL_TYPE
        output[_GUARD_FIELD] = _GUARD
        code = vars(self).get(_CODE)
        if code is not None:
            output["auto_map"] = dict(code.auto_map)
        return output

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Write `config.json` and, beside it, the code that loads the model where resswap is not installed."""
        code = vars(self).get(_CODE)
        if code is not None:
            folder = Path(save_directory)
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in code.files.items():
                (folder / name).write_text(text, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)


@cache
def residual_config_class(family: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of converted models of a family, a subclass of the family's."""
    name = f"Residual{family.__name__}"
    members = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": family.__doc__,
        "__reduce_ex__": lambda self, protocol: (_new_config, (family,), self.__dict__),
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
