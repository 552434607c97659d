"""Replace the residual adds of a decoder layer by calls of connections."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from resswap.errors import UnsupportedModelError

from .rewrite import Rewrite, begins
from .rewriter import Rewriter
from .source import MethodSource
from .trace import trace_method


def rewrite_layer(layer: nn.Module, argument: int | str, at_entry: bool = False, named: bool = True) -> Rewrite:
    """Find the residual adds of a layer and rewrite its `forward`. The layer is only read.

    Args:
        layer: a decoder layer.
        argument: where the stack passes the hidden states: a position (not counting `self`) or a keyword.
        at_entry: whether the streams have just begun when they come in.
        named: whether connections are named after the sublayers they serve, or just `connection`.

    Raises:
        UnsupportedModelError: no residual add was found, or the stream takes a way that cannot be followed.
    """
    source = MethodSource(type(layer))
    trace = trace_method(source, layer, source.parameter(argument))
    rewrite = Rewrite({layer: {}}, begins=all(begins(stream, at_entry) for stream in trace.returned), named=named)
    text = Rewriter(rewrite, trace, at_entry).run()
    rewrite.add_method(layer, "forward", text, has_sites=True)
    if not any(site.kind == "connection" for site in rewrite.sites):
        raise UnsupportedModelError(f"No residual add was found in {source.where}.")
    return rewrite


def checks_checkpointing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse reentrant gradient checkpointing where the streams are not one tensor.

    It gives gradients only to tensors that are arguments themselves; those inside an object would be lost silently.
    """

    @functools.wraps(forward)
    def checked_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "gradient_checkpointing", False) and self.training:
            checkpoint = getattr(self, "_gradient_checkpointing_func", None)
            reentrant = getattr(checkpoint, "keywords", {}).get("use_reentrant", False)
            if reentrant and args and not isinstance(args[0], Tensor):
                raise UnsupportedModelError(
                    "This scheme's streams cannot go through reentrant gradient checkpointing. Enable it with "
                    'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}).'
                )
        return forward(self, *args, **kwargs)

    return checked_forward
