"""LoRA with PEFT: adapters that hold the trained connections, and find their scheme again when they are loaded."""

import dataclasses
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from resswap.configuration import described_scheme, described_selection, described_towers
from resswap.conversion import connections
from resswap.errors import CheckpointError, UnsupportedModelError
from resswap.training import added_modules, convert_as

# PEFT would load such an adapter onto a plain model and leave the connections out. It looks this value up, fails, and
# shows it.
_GUARD = "LORA (this adapter needs resswap: load it with resswap.load_adapter)"


@dataclass
class ResidualLoraConfig(LoraConfig):
    """PEFT's `LoraConfig` with the description of the residual scheme that the adapter was trained with."""

    residual: dict[str, Any] | None = field(default=None, metadata={"help": "The converted model's config.residual."})

    def to_dict(self) -> dict[str, Any]:
        """What is written to `adapter_config.json`."""
        return {**super().to_dict(), "peft_type": _GUARD}

    @classmethod
    def from_peft_type(cls, **kwargs: Any) -> "ResidualLoraConfig":
        """The config that `adapter_config.json` describes."""
        kwargs.pop("peft_type", None)
        return super().from_peft_type(**kwargs)


def lora_config(
    model: PreTrainedModel, r: int = 16, *, target_modules: Any = "all-linear", **options: Any
) -> ResidualLoraConfig:
    """A `LoraConfig` for `get_peft_model` (or the `peft_config` of TRL) that trains and saves the connections as well.

    Args:
        model: a converted model.
        r: rank of the adapters.
        target_modules: which modules get adapters; by default every linear layer but the head. Connections hold none.
        options: further fields of `LoraConfig`; `modules_to_save` is added to.

    Returns:
        The config; with the adapter it is saved, and tells `load_adapter` the scheme.

    Raises:
        UnsupportedModelError: the model is not converted.
    """
    if not connections(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not converted: call resswap.convert first, or use peft.LoraConfig."
        )
    trained = {
        name.rpartition(".")[2]
        for name, module in added_modules(model).items()
        if any(True for _ in module.parameters())
    }
    saved = sorted(trained | set(options.pop("modules_to_save", None) or ()))
    return ResidualLoraConfig(
        r=r,
        target_modules=target_modules,
        modules_to_save=saved or None,
        residual=model.config.residual,
        **{"task_type": "CAUSAL_LM", **options},
    )


def load_adapter(
    model: PreTrainedModel, name_or_path: str | Path, *, is_trainable: bool = False, **options: Any
) -> PeftModel:
    """Load an adapter that was made with `lora_config` onto its base model, which is converted if it is plain.

    Args:
        model: the base model, plain or converted to the same scheme; it is changed in place.
        name_or_path: the folder that the adapter was saved in, or a repository on the Hub.
        is_trainable: go on training; by default the adapter is frozen.
        options: of `PeftModel.from_pretrained`, such as `adapter_name`, `revision`, `token`, `subfolder`.

    Returns:
        The model with the adapter; its `merge_and_unload()` gives the converted model with the adapter's weights.

    Raises:
        CheckpointError: no adapter with connections is there, or it does not fit the model.
        UnsupportedModelError: the model cannot be converted.
    """
    path = str(name_or_path)
    source = {key: options[key] for key in ("revision", "token", "subfolder", "cache_dir") if key in options}
    try:
        config = ResidualLoraConfig.from_pretrained(path, **source)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"There is no adapter with connections in {path}: {error}") from error
    if config.residual is None:
        raise CheckpointError(f"The adapter in {path} holds no connections: load it with PeftModel.from_pretrained.")
    _applied(config.residual)
    if not connections(model):
        convert_as(model, config.residual)
    elif _applied(model.config.residual) != _applied(config.residual):
        raise CheckpointError(
            f"The adapter in {path} was trained with {_listed(_applied(config.residual))}, but the model is converted "
            f"to {_listed(_applied(model.config.residual))}: load it onto the plain model."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            return PeftModel.from_pretrained(model, path, config=config, is_trainable=is_trainable, **options)
        except (UserWarning, RuntimeError, KeyError) as error:
            raise CheckpointError(f"The adapter in {path} does not fit the model: {error}") from error


def _applied(residual: dict[str, Any]) -> dict[str, Any]:
    """What a `config.residual` says of the connections, without where the model came from or in which dtype it was."""
    scheme = described_scheme(residual)
    options = {"scheme": scheme.scheme, **dataclasses.asdict(scheme)}
    return {**options, "towers": described_towers(residual), **described_selection(residual).described()}


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
