"""Find the layers of a model, and read and rewrite their forward. Nothing here knows about schemes."""

from .layer import LayerRewrite, checks_checkpointing, rewrite_layer
from .source import (
    MethodSource,
    original_class,
    rewritten_decorator,
    rewritten_text,
    source_diff,
    subclass_with_forward,
)
from .stack import EXPAND, READOUT, Stack, collapses_hidden_states, find_stack

__all__ = [
    "EXPAND",
    "READOUT",
    "LayerRewrite",
    "MethodSource",
    "Stack",
    "checks_checkpointing",
    "collapses_hidden_states",
    "find_stack",
    "original_class",
    "rewrite_layer",
    "rewritten_decorator",
    "rewritten_text",
    "source_diff",
    "subclass_with_forward",
]
