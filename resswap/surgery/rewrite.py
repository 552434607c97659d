"""What the rewriting of a layer comes to: new methods, and the modules that they call."""

from dataclasses import dataclass, field

from torch import nn

from resswap.errors import UnsupportedModelError

from .stream import Stream


@dataclass(frozen=True)
class Site:
    """A module that the rewritten source calls and that is to be made.

    Attributes:
        module, name: the attribute of the layer, or of a module in it, that it becomes.
        kind: "connection"; or "norm" or "linear", what a map applies to the streams.
        begins: whether the streams have just begun, at the start of the stack or by a norm.
        calls: of a connection, the attributes of `module` that the branch calls.
    """

    module: nn.Module
    name: str
    kind: str
    begins: bool
    calls: tuple[str, ...] = ()


@dataclass
class Rewrite:
    """The new methods of a layer and of modules in it.

    Attributes:
        methods: for each module that changes, its new methods by name.
        sites: what the new methods call, in the order in which it runs.
        begins: whether the streams that the layer returns have just begun, by a norm at its end.
        named: whether sites are named after the sublayers they serve, or `connection` and `map` only.
    """

    methods: dict[nn.Module, dict[str, str]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    begins: bool = False
    named: bool = True

    def add_site(self, module: nn.Module, name: str, kind: str, begins: bool, calls: tuple[str, ...] = ()) -> str:
        """Plan a module as `name`, or `name_1` and so on if that is taken; returns the name."""
        if not self.named:
            name = "connection" if kind == "connection" else "map"
        taken = {site.name for site in self.sites if site.module is module}
        candidates = [name, *(f"{name}_{i}" for i in range(1, len(taken) + 2))]
        name = next(c for c in candidates if c not in taken and not hasattr(module, c))
        self.sites.append(Site(module, name, kind, begins, calls))
        return name

    def add_method(self, module: nn.Module, name: str, text: str, has_sites: bool) -> None:
        """Plan a method; one that holds connections can be called from one place only."""
        methods = self.methods.setdefault(module, {})
        if name in methods and (has_sites or methods[name] != text):
            raise UnsupportedModelError(
                f"{type(module).__qualname__}.{name} takes the residual stream more than once."
            )
        methods[name] = text


def begins(stream: Stream, at_entry: bool) -> bool:
    """Whether a stream has just begun, by a norm or, if it has `at_entry`, as the input."""
    use = stream.origin
    if use is None:
        return all(begins(joined, at_entry) for _, joined in stream.joins) if stream.joins else at_entry
    if use.unit is not None:
        inside = use.kind == "enter" and begins(use.stream, at_entry)
        return all(begins(returned, inside) for returned in use.unit.returned)
    return use.kind == "map" and (stream.norm or begins(use.stream, at_entry))
