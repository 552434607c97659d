"""Which models convert, found by reading the source of the installed transformers; no weights are made."""

import re
from dataclasses import dataclass, fields, replace

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from resswap.errors import OptionError, ResswapError
from resswap.preconditions import OWN_MECHANISMS, check_convertible
from resswap.surgery import Rewrite, find_stack, rewrite_layer


@dataclass(frozen=True)
class Support:
    """What can be said of one model type.

    Attributes:
        model_type: as in `config.model_type`.
        supported: whether it converts; None if its default config makes no model to look at.
        pattern: where its residual adds are and what else is done to the stream; "" if not supported.
        connections_per_layer: how many connections a layer gets, the mean over all layers.
        reason: why it is refused, or not known; "" if supported.
    """

    model_type: str
    supported: bool | None
    pattern: str = ""
    connections_per_layer: float = 0.0
    reason: str = ""


class SupportTable(list[Support]):
    """Rows of `Support`; printed, a Markdown table."""

    def __str__(self) -> str:
        names = [field.name for field in fields(Support)]
        rows = [[_cell(getattr(row, name)) for name in names] for row in self]
        titles = [name.replace("_", " ") for name in names]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(names), *rows))


def support(which: str | PreTrainedConfig | PreTrainedModel | None = None) -> Support | SupportTable:
    """Whether a model converts, and how.

    Args:
        which: a model type such as "llama" or "t5" (its default config is used), a config, or a model; by default
            every causal-LM type of the installed transformers, which takes about a minute.

    Returns:
        One `Support`, of an encoder-decoder for its decoder; or for all types a `SupportTable`.

    Raises:
        OptionError: transformers has no causal or sequence-to-sequence language model of that type.
    """
    if which is None:
        return SupportTable(support(model_type) for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    if isinstance(which, PreTrainedModel):
        return _of_model(which)
    model_type = which.model_type if isinstance(which, PreTrainedConfig) else which
    if model_type not in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}:
        raise OptionError(f"transformers has no causal or sequence-to-sequence language model of type {model_type!r}.")
    if model_type in OWN_MECHANISMS:
        return Support(model_type, False, reason=f"a residual mechanism of its own: {OWN_MECHANISMS[model_type]}")
    if isinstance(which, PreTrainedConfig):
        return _of_model(_on_meta(which))
    try:
        model = _on_meta(CONFIG_MAPPING[model_type]())
    except Exception as error:  # a config is checked in many ways, with errors of its own
        return Support(model_type, None, reason=f"its default config makes no model, ask with one that does: {error}")
    return replace(_of_model(model), model_type=model_type)  # a composite's language model has a type of its own


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with torch.device("meta"):
        return (AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM).from_config(config)


def _of_model(model: PreTrainedModel) -> Support:
    model_type = model.config.model_type
    try:
        check_convertible(model)
        stack = find_stack(model)
        rewrites, begins = [], True
        for _, layer in stack.layers():
            rewrites.append(rewrite_layer(layer, stack.argument, begins))
            begins = rewrites[-1].begins
    except ResswapError as error:
        # Where a file lies is no business of a table that is shown to others.
        return Support(model_type, False, reason=re.sub(r"\(/\S*/(transformers/\S+)", r"(\1", str(error)))
    connections = sum(site.kind == "connection" for rewrite in rewrites for site in rewrite.sites)
    return Support(model_type, True, _pattern(rewrites), round(connections / len(rewrites), 2))


def _pattern(rewrites: list[Rewrite]) -> str:
    """Where the adds are, and what else lies on the residual path."""
    inside = any(len(rewrite.methods) > 1 or any(len(m) > 1 for m in rewrite.methods.values()) for rewrite in rewrites)
    kinds = {site.kind for rewrite in rewrites for site in rewrite.sites}
    texts = [text for rewrite in rewrites for methods in rewrite.methods.values() for text in methods.values()]
    parts = ["adds in submodules or helpers" if inside else "adds in the layer"]
    if "norm" in kinds:
        parts.append("norms on the stream")
    if "linear" in kinds or any(".through(" in text for text in texts):
        parts.append("scales, casts or reshapes of the stream")
    return ", ".join(parts)


def _cell(value: object) -> str:
    words = {True: "yes", False: "no", None: "unknown"}
    if value is None or isinstance(value, bool):
        return words[value]
    return " ".join(str(value).replace("|", "\\|").split())
