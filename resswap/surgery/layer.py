"""Replace the residual adds of a decoder layer by calls of connections."""

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from resswap.errors import UnsupportedModelError

from .source import Edits, MethodSource
from .trace import Add, Path, Stream, Trace


@dataclass(frozen=True)
class LayerRewrite:
    """The new `forward` of one layer.

    Attributes:
        text: its source, in which each residual add is a call of a connection.
        sites: the attribute names of the connections, in the order in which they run.
    """

    text: str
    sites: tuple[str, ...]


def rewrite_layer(layer: nn.Module, argument: int | str) -> LayerRewrite:
    """Find the residual adds of a layer and rewrite its `forward`. The layer is only read.

    Args:
        layer: a decoder layer.
        argument: where the stack passes the hidden states: a position (not counting `self`) or a keyword.

    Raises:
        UnsupportedModelError: no residual add was found, or the stream takes a way that cannot be followed.
    """
    source = MethodSource(type(layer))
    trace = Trace(source, layer, source.parameter(argument))
    edits = Edits(source.text)
    sites: list[str] = []
    for stream in sorted((s for s in trace.streams if s.uses), key=lambda s: s.uses[0].order):
        if stream.of_kind("add"):
            sites.append(_site_name(trace, stream, sites))
            _connect(trace, stream, sites[-1], edits)
        elif stream.of_kind("read"):
            node = stream.of_kind("read")[0].node
            raise UnsupportedModelError(f"A branch reads the residual stream but is not added: {source.at(node)}.")
    if not sites:
        raise UnsupportedModelError(f"No residual add was found in {source.name}.")
    return LayerRewrite(edits.apply(), tuple(sites))


def _site_name(trace: Trace, stream: Stream, taken: list[str]) -> str:
    """`attn_connection` for the add that `self_attn` serves: the largest module that is called within the branch."""
    start, end = stream.uses[0].order, stream.of_kind("add")[-1].order
    called = [name for order, name in trace.calls if start <= order <= end]
    sizes = {name: _num_parameters(getattr(trace.layer, name, None)) for name in called}
    sublayer = max(sizes, key=sizes.get, default="")
    name = f"{sublayer.removeprefix('self_')}_connection" if sizes.get(sublayer) else "connection"
    candidates = [name, *(f"{name}_{i}" for i in range(1, len(taken) + 2))]
    return next(c for c in candidates if c not in taken and not hasattr(trace.layer, c))


def _num_parameters(module: object) -> int:
    return sum(p.numel() for p in module.parameters()) if isinstance(module, nn.Module) else 0


def _connect(trace: Trace, stream: Stream, site: str, edits: Edits) -> None:
    """Open the connection where the stream is first used, and close it at each add."""
    path = _opening(trace, stream)
    block, index = path[-1]
    aliases, reads, adds = (stream.of_kind(kind) for kind in ("alias", "read", "add"))
    alias = aliases[0].node if len(aliases) == 1 else None
    if (
        alias is block[index]
        and all(add.term.id == alias.targets[0].id for add in adds)
        and all(read.node.id == alias.value.id for read in reads)
        and not _flows_on(trace, stream, path)
    ):
        # `residual = hidden_states` is where the branch begins: its names serve for the input and the add.
        branch, add_name = alias.value.id, alias.targets[0].id
        edits.replace(alias, f"{branch}, {add_name} = self.{site}({branch})")
    else:
        branch, add_name = (_fresh(trace, site.replace("connection", word)) for word in ("input", "add"))
        edits.insert_before(block[index], f"{branch}, {add_name} = self.{site}({_holder(stream)})")
        for read in reads:
            edits.replace(read.node, branch)
    for add in adds:
        _close(add, add_name, edits)


def _close(add: Add, add_name: str, edits: Edits) -> None:
    """`residual + f(x)` becomes `residual(f(x))`: the stream's own term goes, the others stay where they are."""
    node = add.node
    if isinstance(node, ast.AugAssign):
        target, value = node.target.id, node.value
        if add.term is value:  # y += residual
            edits.replace(node, f"{target} = {add_name}({target})")
        else:  # residual += f(x)
            edits.replace_between(node.target, value, f"{target} = {add_name}(")
            edits.insert_at_end(node, ")")
        return
    edits.insert_at_start(node, f"{add_name}(")
    edits.remove_term(add.term, add.others)
    edits.insert_at_end(node, ")")


def _opening(trace: Trace, stream: Stream) -> Path:
    """The innermost statement that comes before, or contains, every use of the stream."""
    common = stream.uses[0].path
    for use in stream.uses[1:]:
        depth = 0
        for (block, index), (other, other_index) in zip(common, use.path, strict=False):
            if block is not other:
                break
            depth += 1
            common = (*common[: depth - 1], (block, min(index, other_index)), *common[depth:])
            if index != other_index:
                break
        common = common[:depth]
    while not trace.source.begins_line(_statement(common)):  # an elif, or behind a colon
        common = common[:-1]
    return common


def _statement(path: Path) -> ast.stmt:
    block, index = path[-1]
    return block[index]


def _flows_on(trace: Trace, stream: Stream, opening: Path) -> bool:
    """Whether the stream itself is still needed after the connection has been opened."""
    if stream.of_kind("pass"):
        return True
    blocks = [block for block, _ in opening]
    for join in trace.streams:
        for arm, joined in join.joins:
            other_arms = [other for other, _ in join.joins if other is not arm]
            on_another_way = any(block is other for block in blocks for other in other_arms)
            if joined is stream and not on_another_way and (join.uses or _flows_on(trace, join, opening)):
                return True
    return False


def _holder(stream: Stream) -> str:
    """The variable that holds the stream when it is first used."""
    use = stream.uses[0]
    if isinstance(use, Add):
        return use.term.id
    return use.node.value.id if use.kind == "alias" else use.node.id


def _fresh(trace: Trace, name: str) -> str:
    taken = {node.id for node in ast.walk(trace.source.node) if isinstance(node, ast.Name)}
    while name in taken:
        name += "_"
    return name


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
