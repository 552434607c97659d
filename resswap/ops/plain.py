"""Where plain compositions take over from the hand-written functions.

A hand-written backward is fast and saves little, but autograd cannot see into it. So forwards ask `needs_plain` and
backwards `needs_plain_backward`; where the answer is yes, the reference does the work and can be traced, transformed
and differentiated any number of times.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

Gradients = tuple[Tensor | None, ...]


def needs_plain() -> bool:
    """Whether torch.compile, a trace, a transform of torch.func or a forward-mode derivative is to see operations."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or needs_transformable()


def needs_transformable() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def needs_plain_backward(*grads: Tensor | None) -> bool:
    """Whether gradients are to be differentiated (create_graph=True) or are batched (is_grads_batched=True, vmap)."""
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    if torch.is_grad_enabled() or needs_transformable():
        return True
    return any(grad is not None and is_batched(grad) for grad in grads)


def plain_backward(function: Callable, inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> Gradients:
    """The backward of the plain `function(*inputs)`, differentiable if grad mode is on; it changes no tensor."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Where one input was made from another, the gradient for the latter must not flow through the former: aliases.
        aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        outputs = function(*aliases)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return gradients(outputs, aliases, grads, create_graph)


def gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    create_graph: bool = False,
) -> Gradients:
    """The gradients for inputs, None for those that need none; a grad of None stands for zeros."""
    used = [
        (out, grad.reshape(out.shape))
        for out, grad in zip(outputs, grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    if not used or not wanted:
        return (None,) * len(inputs)
    outputs, grads = zip(*used, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=create_graph, allow_unused=True))
    return tuple(next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs)
