"""What the schemes of compare.py cost: parameters, time and memory of a training step."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from measure import interleaved, ratio, saved_bytes
from models import PLAIN

import resswap


def make_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW in one pass over all parameters: connections have many small ones."""
    return torch.optim.AdamW(resswap.param_groups(model, learning_rate, weight_decay=0.1), fused=True)


def measured_costs(
    path: Path,
    make_model: Callable[[str], torch.nn.Module],
    schemes: list[str],
    input_ids: torch.Tensor,
    rounds: int,
) -> dict[str, dict[str, float]]:
    """The costs of each scheme, from the file if it has them all; else measured, all together, and written there.

    Time is compared within rounds in which each scheme does one step, since a shared machine changes its speed.

    Args:
        make_model: gives the model with a scheme.
        schemes: their names, with that of the plain model.
        input_ids: `[batch, tokens]`, the blocks of a step.
        rounds: how many rounds are timed.
    """
    costs = json.loads(path.read_text()) if path.exists() else {}
    if not set(schemes) <= set(costs):
        models = {scheme: make_model(scheme).train() for scheme in schemes}
        seconds = interleaved({scheme: _step(model, input_ids) for scheme, model in models.items()}, rounds, warmup=2)
        costs = {
            scheme: {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "added": sum(parameter.numel() for parameter in resswap.added_parameters(model).values()),
                "seconds_per_step": statistics.median(seconds[scheme]),
                "time_ratio": ratio(seconds[scheme], seconds[PLAIN]),
                "saved_bytes": saved_bytes(model, lambda model=model: _loss(model, input_ids)),
            }
            for scheme, model in models.items()
        }
        path.write_text(json.dumps(costs, indent=2) + "\n")
    return {scheme: costs[scheme] for scheme in schemes}


def _loss(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=input_ids, labels=input_ids, use_cache=False).loss


def _step(model: torch.nn.Module, input_ids: torch.Tensor) -> Callable[[], None]:
    """A whole step of training, on the same blocks each time."""
    optimizer = make_optimizer(model, 1e-3)

    def step() -> None:
        _loss(model, input_ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
