"""What conversion did to a model, in the words of the code that is to do it again."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from resswap.errors import UnsupportedModelError
from resswap.schemes import Connection, ResidualModule
from resswap.surgery import (
    MAP,
    READOUT,
    Methods,
    collapses_hidden_states,
    original_class,
    rewritten_decorator,
    rewritten_methods,
)


@dataclass(frozen=True)
class Rewritten:
    """A rewritten class as it is written down.

    Attributes:
        name: its name in the file; that of `original`, with a number where there are several.
        original: the family's class.
        methods: the names of its methods and what they were compiled from.
        decorator: a function of resswap that wraps `forward`.
    """

    name: str
    original: type[nn.Module]
    methods: Methods
    decorator: Callable | None


@dataclass(frozen=True)
class Tower:
    """The fields of a `Conversion`: the parts as expressions, the rest as it is."""

    model: str
    owner: str
    list_name: str
    layers: tuple[str, ...]
    maps: str
    tower: str


@dataclass(frozen=True)
class Structure:
    """How a model was converted: its towers, and the rewritten classes that their parts name."""

    towers: tuple[Tower, ...]
    classes: tuple[Rewritten, ...]


def structure(model: PreTrainedModel) -> Structure:
    """How a model was converted.

    Raises:
        UnsupportedModelError: something was changed outside the models around the stacks.
    """
    arounds = [m for m in model.modules() if rewritten_decorator(type(m)) is collapses_hidden_states]
    inside = {module for around in arounds for module in around.modules() if _is_changed(module)}
    if len(inside) < sum(_is_changed(module) for module in model.modules()):
        names = " and ".join(type(around).__name__ for around in arounds)
        raise UnsupportedModelError(f"More of {type(model).__name__} was rewritten than {names}.")
    classes: dict[type, Rewritten] = {}
    towers = tuple(_tower(around, classes) for around in arounds)
    return Structure(towers, tuple(dict.fromkeys(classes.values())))


def _tower(around: PreTrainedModel, classes: dict[type, Rewritten]) -> Tower:
    """How the stack in one model was converted; fills `classes`."""
    owner_name, owner = next((name, module) for name, module in around.named_modules() if hasattr(module, READOUT))
    changed = {name: module for name, module in around.named_modules() if _is_changed(module)}
    list_name = _list_name(owner)
    prefix = f"{owner_name}.{list_name}.".lstrip(".")
    in_layers: list[dict[str, nn.Module]] = [{} for _ in getattr(owner, list_name)]
    outside = {}
    for full_name, module in changed.items():
        index, _, name = full_name.removeprefix(prefix).partition(".")
        if full_name.startswith(prefix):
            in_layers[int(index)][name] = module
        elif not isinstance(module, ResidualModule):
            outside[full_name] = module
    layers = tuple(_part(modules, classes) for modules in in_layers)
    maps = getattr(owner, MAP).kind if hasattr(owner, MAP) else ""
    return Tower(_part(outside, classes), owner_name, list_name, layers, maps, getattr(owner, READOUT).tower)


def _is_changed(module: nn.Module) -> bool:
    return isinstance(module, ResidualModule) or rewritten_methods(type(module)) is not None


def _list_name(owner: nn.Module) -> str:
    """The owner's attribute that holds the layers: the one list with connections in it."""
    return next(
        name
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and any(isinstance(module, Connection) for module in child.modules())
    )


def _part(modules: dict[str, nn.Module], classes: dict[type, Rewritten]) -> str:
    """The expression for what changed in one module, by the names there; fills `classes`."""
    new = {name: module for name, module in modules.items() if isinstance(module, ResidualModule)}
    named = [f'"{name}": {_rewritten(type(modules[name]), classes).name}' for name in modules if name not in new]
    # Connections in the order of their indices, which `installation` counts up.
    order = sorted(new, key=lambda name: (not isinstance(new[name], Connection), getattr(new[name], "index", 0)))
    slots = [_slot(name, new[name]) for name in order]
    arguments = "".join(
        f"            {left}\n"
        + "".join(f"                {element},\n" for element in elements)
        + f"            {right},\n"
        for left, elements, right in (("{", named, "}"), ("(", slots, ")"))
        if elements
    )
    return f"Part(\n{arguments}        )"


def _slot(name: str, module: ResidualModule) -> str:
    kind = "" if module.kind == "connection" else f', "{module.kind}"'
    begins = ", begins=True" if module.begins else ""
    swapped = "" if module.swapped else ", swapped=False"
    return f'Slot("{name}"{kind}{begins}{swapped})'


def _rewritten(cls: type, classes: dict[type, Rewritten]) -> Rewritten:
    if cls not in classes:
        original, methods, decorator = original_class(cls), rewritten_methods(cls), rewritten_decorator(cls)
        known = set(classes.values())
        same = [r for r in known if (r.original, r.methods, r.decorator) == (original, methods, decorator)]
        taken = sum(r.original.__name__ == original.__name__ for r in known)
        name = f"{original.__name__}_{taken + 1}" if taken else original.__name__
        classes[cls] = same[0] if same else Rewritten(name, original, methods, decorator)
    return classes[cls]
