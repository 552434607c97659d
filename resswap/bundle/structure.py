"""What conversion did to a model, in the words of the code that is to do it again."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from resswap.errors import UnsupportedModelError
from resswap.schemes import Connection
from resswap.surgery import READOUT, original_class, rewritten_decorator, rewritten_text


@dataclass(frozen=True)
class Rewritten:
    """A rewritten class as it is written down.

    Attributes:
        name: its name in the file; that of `original`, with a number where there are several.
        original: the family's class.
        texts: what its methods were compiled from.
        decorator: a function of resswap that wraps `forward`.
    """

    name: str
    original: type[nn.Module]
    texts: tuple[str, ...]
    decorator: Callable | None


def structure(model: PreTrainedModel, classes: dict[type, Rewritten]) -> tuple[str, str, list[str]]:
    """The owner's `Part`, the name of its list of layers, and each layer's `Part`, as expressions; fills `classes`."""
    owner_name, owner = next((name, module) for name, module in model.named_modules() if hasattr(module, READOUT))
    parts: dict[tuple[str, ...], dict[str, str]] = {(): {}}
    sites: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for full_name, module in model.named_modules():
        connection = isinstance(module, Connection)
        if not connection and not rewritten_text(type(module)):
            continue
        if not f"{full_name}.".startswith(f"{owner_name}." if owner_name else ""):
            raise UnsupportedModelError(f"{full_name} was rewritten, and is not part of {type(owner).__name__}.")
        path = full_name.removeprefix(owner_name).strip(".").split(".") if full_name != owner_name else []
        in_layer = len(path) > 1 and path[1].isdecimal()
        key, name = (tuple(path[:2]), ".".join(path[2:])) if in_layer else ((), ".".join(path))
        if connection:
            sites.setdefault(key, []).append((module.index, name))
        else:
            parts.setdefault(key, {})[name] = _rewritten(type(module), classes).name
    lists = {key[0] for key in sites if key}
    order = [index for key in sorted(sites, key=lambda k: int(k[1])) for index, _ in sorted(sites[key])]
    if len(lists) != 1 or () in sites or order != sorted(order):
        raise UnsupportedModelError(f"The connections of {type(owner).__name__} do not follow its one list of layers.")
    list_name = lists.pop()
    layers = [
        _part(parts.get((list_name, str(i)), {}), [name for _, name in sorted(sites.get((list_name, str(i)), []))])
        for i in range(len(getattr(owner, list_name)))
    ]
    return _part(parts[()], []), list_name, layers


def _rewritten(cls: type, classes: dict[type, Rewritten]) -> Rewritten:
    if cls not in classes:
        original = original_class(cls)
        chain = [base for base in cls.__mro__[: cls.__mro__.index(original)] if "_resswap_text" in vars(base)]
        texts = tuple(rewritten_text(base) for base in reversed(chain))
        decorator = rewritten_decorator(cls)
        same = [r for r in classes.values() if (r.original, r.texts, r.decorator) == (original, texts, decorator)]
        taken = sum(r.original.__name__ == original.__name__ for r in set(classes.values()))
        name = f"{original.__name__}_{taken + 1}" if taken else original.__name__
        classes[cls] = same[0] if same else Rewritten(name, original, texts, decorator)
    return classes[cls]


def _part(classes: dict[str, str], connections: list[str]) -> str:
    listed = ", ".join(f'"{name}": {cls}' for name, cls in classes.items())
    names = ", ".join(f'"{name}"' for name in connections) + ("," if len(connections) == 1 else "")
    return f"Part({{{listed}}}, ({names}))"
