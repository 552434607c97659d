"""What state a model must be in to be converted."""

import inspect

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from resswap.errors import UnsupportedModelError
from resswap.schemes import Connection
from resswap.surgery import rewritten_methods

OWN_MECHANISMS = {
    "deepseek_v4": "manifold-constrained hyper-connections",
    "gemma3n": "alternating updates (AltUp) of several streams",
    "gemma3n_text": "alternating updates (AltUp) of several streams",
    "hy_v4": "hyper-connections",
    "inkling2_text": "attention over blocks of residuals",
    "inkling2_loop_text": "attention over blocks of residuals",
    "qwen4_exp": "gated hyper-connections",
    "qwen4_exp_text": "gated hyper-connections",
    "reformer": "reversible residual layers",
}
"""Model types whose layers do not add to one residual stream, and what they do instead."""


def check_convertible(model: object) -> None:
    """Refuse what would end in half a conversion, naming the remedy.

    Raises:
        UnsupportedModelError: not a transformers model, or already converted, compiled, wrapped or dispatched.
    """
    name = type(model).__name__
    inner = _wrapped_model(model)
    if inner is not None:
        raise UnsupportedModelError(
            f"A {name} wraps the model: convert the {type(inner).__name__} before wrapping it."
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{name} is not a transformers PreTrainedModel.")
    types = {model.config.model_type, model.config.get_text_config(decoder=True).model_type}
    known = types <= set(CONFIG_MAPPING_NAMES)
    decodes = model.can_generate() or getattr(model.config, "is_encoder_decoder", False)
    if known and not types & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) and not decodes:
        raise UnsupportedModelError(f"{name} is not a decoder: transformers has no causal language model of its type.")
    own = next((OWN_MECHANISMS[kind] for kind in types if kind in OWN_MECHANISMS), None)
    if own is not None:
        raise UnsupportedModelError(f"{_layer_class(model)} has a residual mechanism of its own: {own}.")
    if hasattr(model.config, "residual") and not any(isinstance(m, Connection) for m in model.modules()):
        raise UnsupportedModelError(
            f"The config of this {name} describes a conversion, but the model has no connections: build it with "
            "AutoModelForCausalLM.from_config(config) to get a converted model, or from a plain config."
        )
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if rewritten_methods(type(module)):
            raise UnsupportedModelError(f"{name} is already converted at {where}: call resswap.revert(model) first.")
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise UnsupportedModelError(f"{where} is compiled: convert first, then compile.")
        if hasattr(module, "_hf_hook") or _replaced_forward(module):
            raise UnsupportedModelError(
                f"{where} has hooks in place of its forward, as device_map or CPU offload put there: convert first "
                "and dispatch then, or call accelerate.hooks.remove_hook_from_module(model, recurse=True) before."
            )
        if hasattr(module, "_get_fsdp_state") or hasattr(module, "_fsdp_wrapped_module"):
            raise UnsupportedModelError(f"{where} is sharded by FSDP: convert first, then shard.")
    sharded = next((path for path, p in model.named_parameters() if hasattr(p, "ds_id")), None)
    if sharded is not None:
        raise UnsupportedModelError(
            f"{sharded} is partitioned by DeepSpeed ZeRO-3: convert before deepspeed.initialize."
        )


def _wrapped_model(model: object) -> nn.Module | None:
    """The model inside torch.compile's, DDP's or PEFT's wrapper."""
    if not isinstance(model, nn.Module) or isinstance(model, PreTrainedModel):
        return None
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module):
            return inner
    return None


def _layer_class(model: PreTrainedModel) -> str:
    """The class of the decoder's layers and where it is defined."""
    layers = next(m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m))
    cls = type(layers[0])
    return f"{cls.__module__}.{cls.__qualname__} (line {inspect.getsourcelines(cls)[1]})"


def _replaced_forward(module: nn.Module) -> bool:
    """Whether a forward of the instance's own hides that of its class. Removed hooks leave the class's own there."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def drop_dequantized_flag(model: PreTrainedModel) -> None:
    """Let a model that was read from a GGUF file into plain float weights be saved.

    transformers unpacks the weights of most GGUF files but goes on calling the model quantised, and refuses to save
    it. Nothing is done to a model whose weights are still packed.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    config = getattr(quantizer, "quantization_config", None)
    if config is not None and config.quant_method == "gguf" and not getattr(quantizer, "packed_modules", None):
        quantizer.remove_quantization_config(model)
