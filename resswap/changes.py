"""Make the changes that were planned: all of them or none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from resswap.planning import Change

_State = tuple[type[nn.Module], dict[str, Any]]


def make_changes(changes: Sequence[Change]) -> None:
    """Make the changes; where that fails, everything is as it was before."""
    states = _states(changes)
    try:
        _make(changes)
    except BaseException:
        _undo(changes, states)
        raise


@contextmanager
def made_for_now(changes: Sequence[Change]) -> Iterator[None]:
    """Within the context the changes are made, and after it, on errors too, everything is as it was before."""
    states = _states(changes)
    try:
        _make(changes)
        yield
    finally:
        _undo(changes, states)


def _make(changes: Sequence[Change]) -> None:
    for change in changes:
        for name, child in change.children.items():
            change.module.add_module(name, child)
        change.module.__class__ = change.new_class
        vars(change.module).pop("forward", None)  # what removed hooks leave behind: the old class's forward


def _states(changes: Sequence[Change]) -> list[_State]:
    """The class of each module, and a forward of its own if it has one."""
    return [
        (type(change.module), {key: value for key, value in vars(change.module).items() if key == "forward"})
        for change in changes
    ]


def _undo(changes: Sequence[Change], states: Sequence[_State]) -> None:
    for change, (old_class, own) in zip(changes, states, strict=True):
        change.module.__class__ = old_class
        vars(change.module).update(own)
        for name in change.children:
            change.module._modules.pop(name, None)
