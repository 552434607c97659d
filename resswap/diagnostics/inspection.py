"""Look inside a model during one forward and backward pass."""

import dataclasses
import inspect as _inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from resswap.configuration import described_scheme
from resswap.conversion import connections, plain_connections
from resswap.errors import OptionError, UnsupportedModelError
from resswap.schemes import ResidualConfig

from .probe import Probe
from .report import Report


def inspect(
    model: nn.Module, batch: Tensor | Mapping[str, Any], loss: Callable[[Any], Tensor] | None = None
) -> Report:
    """See what the residual connections of a model do with one batch.

    A plain model is the baseline: its residual adds are watched as connections of one stream. The model runs in
    evaluation mode; nothing about it is changed afterwards: parameters, gradients, mode, hooks, random state.

    Args:
        model: a converted or a plain decoder.
        batch: token ids `[batch, seq]`, or the arguments of the model's `forward` by name. With `labels` among them
            gradients are measured too.
        loss: a function of the model's output that gives the loss, instead of `labels`.

    Returns:
        The report; print it, or see `Report.to_dict`, `Report.figure` and `Report.save_html`.

    Raises:
        UnsupportedModelError: a plain model whose residual adds cannot be found, or a model whose weights are not
            in memory.
        OptionError: all labels are -100, so there is no loss.

    Example:
        >>> report = resswap.inspect(model, {"input_ids": input_ids, "labels": input_ids})
        >>> print(report)
        >>> report.save_html("report.html")
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} is not a model.")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    away = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if away is not None:
        raise UnsupportedModelError(f"{away} is offloaded or not loaded: inspect the model where it fits in memory.")
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and (labels == -100).all():
        raise OptionError("labels: all of them are -100, which no loss counts; give the ids of some tokens.")
    parameters = _inspect.signature(model.forward).parameters
    if "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        inputs.setdefault("use_cache", False)  # some caches are written in place, which has no gradient
    converted = bool(connections(model))
    scheme = described_scheme(model.config.residual) if converted else ResidualConfig()
    with ExitStack() as stack:
        stack.enter_context(_as_it_was(model))
        stack.enter_context(torch.inference_mode(False))
        inputs = {name: _ordinary(value) for name, value in inputs.items()}
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # no hook on a gradient runs in a compiled graph
        if not converted:
            stack.enter_context(plain_connections(model))
        probe = stack.enter_context(Probe(model))
        model.eval()
        value = _run(model, inputs, loss)
    first = next(value for value in inputs.values() if isinstance(value, Tensor))
    return Report(
        model=type(model).__name__,
        scheme=scheme.scheme,
        options=dataclasses.asdict(scheme),
        batch=tuple(first.shape[:2]),
        loss=value,
        measures=tuple(probe.measures()),
    )


def _ordinary(value: Any) -> Any:
    """A tensor made in inference mode, which has no gradient to offer, as an ordinary one."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _run(model: nn.Module, inputs: dict[str, Any], loss: Callable[[Any], Tensor] | None) -> float | None:
    """One forward pass, and one backward pass to the streams' beginning if there is a loss; returns the loss."""
    wants_gradient = loss is not None or inputs.get("labels") is not None
    begun: list[Tensor] = []

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        tensors = [leaf for leaf in _pytree.tree_leaves(args[0]) if isinstance(leaf, Tensor)]
        begun.extend(tensor if tensor.requires_grad else tensor.requires_grad_() for tensor in tensors)

    first = min(connection.index for connection in connections(model).values())
    starts = [connection for connection in connections(model).values() if connection.index == first]
    hooks = [connection.register_forward_pre_hook(begin) for connection in starts] if wants_gradient else []
    try:
        with torch.set_grad_enabled(wants_gradient):
            output = model(**inputs)
            value = loss(output) if loss is not None else getattr(output, "loss", None)
            if value is not None and wants_gradient:
                torch.autograd.grad(value, begun, allow_unused=True)  # leaves the parameters' gradients alone
    finally:
        for hook in hooks:
            hook.remove()
    return None if value is None else value.item()


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Give modules their mode back, and torch its random state."""
    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
