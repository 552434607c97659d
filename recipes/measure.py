"""Measure models against each other: interleaved rounds, bytes saved for the backward, peak memory."""

import gc
import re
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm


def interleaved(works: dict[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds that each of the works takes in each round. All of them run once in every round, in turn.

    A machine that slows down for a while slows all of them, so that ratios within a round hold.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for index in tqdm(range(-warmup, rounds), desc="Rounds", leave=False):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:  # another order in each round
            gc.collect()
            _synchronize()
            start = time.perf_counter()
            works[name]()
            _synchronize()
            if index >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: list[float], plain: list[float]) -> float:
    """The median over the rounds of how much longer it took than the plain model in the same round."""
    return statistics.median(own / other for own, other in zip(seconds, plain, strict=True))


def saved_bytes(model: nn.Module, work: Callable[[], Any]) -> int:
    """The bytes that autograd keeps for the backward of what `work` computes.

    Each storage counts once, whole, however many operations save a view of it; parameters do not count.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = work()
    size = sum(storage.nbytes() for storage in kept.values())
    del result
    return size


def peak_memory(work: Callable[[], Any]) -> int:
    """The most bytes in use while `work` runs: of the GPU if there is one, else of the whole process so far."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated()
    work()
    status = Path("/proc/self/status")
    high_water = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if high_water:  # getrusage would count what the process that started this one had in use
        return 1024 * int(high_water[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, in bytes


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
