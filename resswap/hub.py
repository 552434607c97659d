"""Load saved converted models through transformers' Auto classes."""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from resswap.auto import model_classes, register_auto_classes
from resswap.configuration import MODEL_TYPE, residual_config_class, restored
from resswap.conversion import complete
from resswap.errors import CheckpointError


class ResswapConfig(PreTrainedConfig):
    """What `model_type: resswap` in a `config.json` stands for: the config of the family described there."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of the converted family, whose models the Auto classes then build.

        Raises:
            CheckpointError: `residual` does not describe a scheme that this version of resswap knows.
        """
        config_dict = restored(config_dict)
        base_model_type = config_dict["model_type"]
        if base_model_type not in CONFIG_MAPPING or base_model_type == MODEL_TYPE:
            raise CheckpointError(
                f"config.json: residual.base_model_type is {base_model_type!r}, which this version of transformers "
                "does not know."
            )
        family = CONFIG_MAPPING[base_model_type]
        classes = model_classes(family)
        if AutoModelForCausalLM not in classes and not any(cls.can_generate() for cls in classes.values()):
            raise CheckpointError(f"config.json: residual.base_model_type is {base_model_type!r}, not a decoder.")
        config_dict.pop("auto_map", None)  # the code that is installed is the one to use
        register_auto_classes(family, complete)
        try:
            return residual_config_class(family).from_dict(config_dict, **kwargs)
        except Exception as error:
            raise CheckpointError(f"config.json does not describe a {base_model_type} model: {error}") from error


AutoConfig.register(MODEL_TYPE, ResswapConfig, exist_ok=True)
