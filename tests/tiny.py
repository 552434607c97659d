"""Tiny random models of several families, and how tests look at them."""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import resswap

VOCAB = 128
_COMMON = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": _LLAMA_LIKE,
    "gpt2": {**_COMMON, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "qwen3": {**_LLAMA_LIKE, "head_dim": 16},
    "gemma2": {**_LLAMA_LIKE, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "olmo2": _LLAMA_LIKE,
    "granite": {**_LLAMA_LIKE, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "mistral": {**_LLAMA_LIKE, "sliding_window": 16},
    "mixtral": {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        **_COMMON,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "phi3": {**_LLAMA_LIKE, "resid_pdrop": 0.0},
    "gemma3_text": {**_LLAMA_LIKE, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
}
FAMILIES = ["llama", "gpt2", "qwen3", "gemma2", "olmo2", "granite"]
SCHEMES = list(resswap.available_schemes())
EXACT = [name for name, options in resswap.available_schemes().items() if options.preserves_function]
TRAINABLE = [name for name in SCHEMES if name != "none"]  # with parameters of their own
# A scheme with streams and one with sources on all families, the others on a plain one and a post-norm one.
PAIRS = [
    (family, scheme)
    for scheme in TRAINABLE
    for family in (FAMILIES if scheme in ("mhc", "attnres") else ["llama", "olmo2"])
]
SOURCES = ["attnres", "block_attnres", "delta_attnres", "denseformer"]  # whose streams are not one tensor


def tiny(model_type: str = "llama", dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
    """A random model in evaluation mode, with weights large enough that logits exceed 1 and errors show."""
    config = CONFIG_MAPPING[model_type](**{**CONFIGS[model_type], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.08 if "embed" not in name and "wte" not in name else 0.5)
    return model


def input_ids(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Everything that conversion added, by name."""
    return resswap.added_parameters(model)


def randomise_connections(model: nn.Module, std: float = 0.3) -> None:
    """Draw every new parameter at random, far from where conversion puts it."""
    generator = torch.Generator().manual_seed(2)
    for parameter in new_parameters(model).values():
        parameter.data += std * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    return model(ids, use_cache=False, **kwargs).logits


def load_by_own_code(folder: Path, auto_class: str = "AutoModelForCausalLM") -> PreTrainedModel:
    """What an Auto class does with `trust_remote_code=True` where resswap is not imported."""
    reference = json.loads((folder / "config.json").read_text())["auto_map"][auto_class]
    return get_class_from_dynamic_module(reference, folder).from_pretrained(folder).eval()
