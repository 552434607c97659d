"""What the commands do with models and tokenizers on disk or on the Hub."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from resswap.auto import model_classes
from resswap.configuration import family_config_class
from resswap.errors import CheckpointError, OptionError, ResswapError
from resswap.publishing import hub_id

SAMPLE = """\
The residual connection is a sum: each layer of a network reads what the layers before it have written, and adds its
own part. The sum grows with depth while each part stays about the same size, so that a late layer has little say in
what the network knows. One way out is to keep several streams side by side and to learn how they mix. Another is to
keep every part by itself, and to let each layer choose which of them it wants to read.
"""
"""What a model reads if nobody gives it a text."""


def is_model_type(name: str) -> bool:
    """Whether `name` cannot be a folder or a repository, and so has to be a model type such as "llama"."""
    return "/" not in name and not Path(name).exists()


def read_config(name: str) -> PreTrainedConfig:
    """The config of a folder or a repository on the Hub.

    Raises:
        CheckpointError: there is none that transformers can read.
    """
    if not Path(name).exists() and hub_id(name) is None:
        raise CheckpointError(f"{name}: there is no such folder, and it cannot be a name on the Hub.")
    try:
        return AutoConfig.from_pretrained(name)
    except ResswapError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{name} has no config that can be read: {error}") from error


def load_model(name: str) -> PreTrainedModel:
    """A model as it was saved, with the head and in the dtype that it was saved with, in evaluation mode.

    Raises:
        CheckpointError: it cannot be loaded, or not all of its weights are there.
    """
    config = read_config(name)
    saved = (config.architectures or [None])[0]
    classes = model_classes(family_config_class(type(config)))
    auto_class = next((auto for auto, cls in classes.items() if cls.__name__ == saved), AutoModelForCausalLM)
    try:
        model, info = auto_class.from_pretrained(name, dtype="auto", output_loading_info=True)
    except (ResswapError, ImportError):
        raise
    except Exception as error:  # damaged files and unknown models end in errors of many kinds
        raise CheckpointError(f"{name} cannot be loaded: {error}") from error
    if info["missing_keys"]:
        raise CheckpointError(f"{name}: the weights lack {min(info['missing_keys'])}, which config.json asks for.")
    return model.eval()


def build_without_weights(name: str) -> PreTrainedModel:
    """A model of a type's default config, or of that in a folder or on the Hub, on the meta device.

    Raises:
        OptionError: there is no causal language model of that type.
        CheckpointError: there is no config that can be read, or it makes no model.
    """
    if is_model_type(name) and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise OptionError(f"{name} is no folder, and transformers has no causal language model of that type.")
    try:
        config = CONFIG_MAPPING[name]() if is_model_type(name) else read_config(name)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ResswapError:
        raise
    except Exception as error:  # configs are checked in many ways, with errors of their own
        raise CheckpointError(f"{name}: the config makes no model: {error}") from error


def find_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a model; None if there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception:  # the error depends on what else lies there
        return None


def token_ids(tokenizer_name: str, text: str, max_tokens: int) -> Tensor:
    """The first tokens of a text, `[1, seq]`.

    Raises:
        CheckpointError: there is no tokenizer.
        OptionError: the text has less than two tokens.
    """
    tokenizer = find_tokenizer(tokenizer_name)
    if tokenizer is None:
        raise CheckpointError(f"{tokenizer_name} has no tokenizer that can be loaded: name one with --tokenizer.")
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=max_tokens)["input_ids"]
    if ids.shape[1] < 2:
        raise OptionError(f"The text has {ids.shape[1]} tokens; give one of at least 2.")
    return ids


def fitting(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """As many of the tokens as the model has positions for.

    Raises:
        CheckpointError: the tokens are not the model's.
    """
    config = model.config.get_text_config(decoder=True)
    if ids.max() >= config.vocab_size:
        raise CheckpointError(
            f"The tokenizer gives the id {int(ids.max())} where the model has {config.vocab_size} tokens: name the "
            "model's own with --tokenizer."
        )
    return ids[:, : getattr(config, "max_position_embeddings", None)]


@torch.no_grad()
def sample_logits(model: PreTrainedModel) -> Tensor:
    """What a model makes of 2 × 32 random tokens, always the same: `[2, 32, vocab]`, or what its head gives."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": fitting(model, ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    output = model(**inputs, use_cache=False)
    return output["logits"] if "logits" in output else output[0]


def difference(logits: Tensor, others: Tensor) -> float:
    """The largest difference, relative to the largest of the logits."""
    return float((logits.double() - others.double()).abs().max() / logits.double().abs().max().clamp_min(1e-30))


def tolerance(dtype: torch.dtype) -> float:
    """A relative difference that rounding may add up to over a model's depth: the root of the dtype's precision."""
    return torch.finfo(dtype).eps ** 0.5
