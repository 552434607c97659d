"""The model of a run: loaded or new, converted or not."""

import difflib
from pathlib import Path
from typing import Any

import torch
from arguments import ModelArguments
from common import RecipeError, one_line, parse_options
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import get_tokenizer_config

import resswap
from resswap.preconditions import drop_dequantized_flag
from resswap.schemes import scheme_config

PLAIN = "residual"


def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    """The tokenizer that was named, else the pretrained model's, else one that needs no files: bytes."""
    name = args.tokenizer_name or args.model_name_or_path
    if name is None:
        return ByT5Tokenizer(extra_ids=0)
    options = {} if args.tokenizer_name else {"gguf_file": args.gguf_file}
    # AutoTokenizer takes Mistral's class for every model of that type, whatever tokenizer was saved beside it.
    is_bytes = Path(name).is_dir() and get_tokenizer_config(name).get("tokenizer_class") == "ByT5Tokenizer"
    return _load(ByT5Tokenizer if is_bytes else AutoTokenizer, "tokenizer", name, args, **options)


def load_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The config of the model that the options describe; a new one gets the tokenizer's size and special tokens."""
    if args.model_name_or_path:
        return _load(AutoConfig, "config", args.model_name_or_path, args, gguf_file=args.gguf_file)
    if args.config_name:
        return _load(AutoConfig, "config", args.config_name, args)
    if args.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(args.model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        hint = f"did you mean {' or '.join(near)}?" if near else "try llama or gpt2"
        raise RecipeError(f"transformers has no causal language model of type {args.model_type!r}; {hint}")
    overrides = parse_options(args.config_overrides)
    default = AutoConfig.for_model(args.model_type)
    unknown = [name for name in overrides if not hasattr(default, name)]
    if unknown:
        raise RecipeError(f"the config of {args.model_type} has no {', '.join(unknown)}; see --config_overrides")
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        # Built in one go, not changed afterwards: head_dim and the like follow from the other values.
        return AutoConfig.for_model(args.model_type, **{"vocab_size": len(tokenizer), **special, **overrides})
    except Exception as error:  # configs validate themselves, with errors of more than one base class
        raise RecipeError(f"--config_overrides does not fit {args.model_type}: {one_line(error)}") from error


def check_scheme(config: PreTrainedConfig, scheme: str | None, options: dict[str, Any]) -> bool:
    """Whether the options ask to convert the model; an error if they do not fit together, or not to the model."""
    loaded = getattr(config, "residual", None)
    if loaded:
        if scheme not in (None, loaded["scheme"]):
            raise RecipeError(
                f"the model is already converted to {loaded['scheme']!r}, not {scheme!r}; leave --scheme out, "
                "or start from the original model"
            )
        if options:
            raise RecipeError("--scheme_options cannot change a converted model; start from the original model")
        return False
    if scheme in (None, PLAIN):
        if options:
            raise RecipeError(f"--scheme_options needs a --scheme other than {PLAIN}")
        return False
    scheme_config(scheme, options)  # raises if there is no such scheme or option
    return True


def load_model(
    args: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, meta: bool = False
) -> PreTrainedModel:
    """The model that the options describe, in float32: loaded or new, then converted if the options ask for it.

    With `meta` it has no weights, and takes no memory.
    """
    options = parse_options(args.scheme_options)
    converts = check_scheme(config, args.scheme, options)
    if meta:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    elif args.model_name_or_path:
        model = _load(
            AutoModelForCausalLM, "model", args.model_name_or_path, args, gguf_file=args.gguf_file, dtype=torch.float32
        )
    else:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code, dtype=torch.float32)
    drop_dequantized_flag(model)  # which would keep a plain model from being saved
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise RecipeError(f"the tokenizer has {len(tokenizer)} tokens, but the model only {rows}; they do not fit")
    if converts:
        resswap.convert(model, scheme=args.scheme, **options)
    return model


def add_lora(model: PreTrainedModel, args: ModelArguments) -> torch.nn.Module:
    """The model with LoRA adapters, which train together with the connections if it is converted."""
    from peft import LoraConfig, get_peft_model  # takes seconds, so only where it is needed

    options = {"lora_alpha": args.lora_alpha or 2 * args.lora_r, "lora_dropout": args.lora_dropout}
    if hasattr(model.config, "residual"):
        config = resswap.lora_config(model, args.lora_r, **options)
    else:
        config = LoraConfig(r=args.lora_r, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config)


def _load(auto_class: Any, what: str, name: str, args: ModelArguments, **options: Any) -> Any:
    try:
        return auto_class.from_pretrained(name, trust_remote_code=args.trust_remote_code, **options)
    except resswap.ResswapError:
        raise
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"there is no {what} in the folder or on the Hub under {name!r}: {one_line(error)}"
        ) from error


def block_losses(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """The mean next-token loss of each block: `[batch, tokens]` -> `[batch]`."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none")
    return losses.mean(dim=1)
