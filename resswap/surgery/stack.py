"""Find the stack of decoder layers by its owner's loop, and rewrite that loop."""

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from resswap.errors import UnsupportedModelError

from .source import Edits, MethodSource

EXPAND, READOUT = "stream_expand", "stream_readout"
"""The attributes of the owner that begin and end the streams."""


@dataclass(frozen=True)
class Loop:
    """The loop `for layer in self.layers: hidden_states = layer(hidden_states, ...)` in a `forward`."""

    statement: ast.For
    call: ast.Call
    stream: str
    argument: int | str


@dataclass(frozen=True)
class Stack:
    """A stack of layers and the module that runs them.

    Attributes:
        owner: the module whose `forward` loops over the layers.
        owner_name, list_name: its name in the model, and its attribute that holds the layers.
        argument: where the loop passes the hidden states to a layer.
        text: the owner's new `forward`: streams are expanded before the loop and read out after it.
    """

    owner: nn.Module
    owner_name: str
    list_name: str
    argument: int | str
    text: str

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers in the order of depth, with their names in the model."""
        prefix = f"{self.owner_name}." if self.owner_name else ""
        for index, layer in enumerate(getattr(self.owner, self.list_name)):
            yield f"{prefix}{self.list_name}.{index}", layer


def find_stack(model: nn.Module) -> Stack:
    """The one stack of decoder layers in `model`.

    Raises:
        UnsupportedModelError: there is none, or more than one, or its loop does more than pass the stream on.
    """
    loops: list[tuple[str, nn.Module, str, MethodSource, Loop]] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside) or type(module).forward is nn.Module.forward:
            continue
        for list_name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) and not isinstance(module, nn.ModuleList):
                source = MethodSource(type(module))
                loop = _find_loop(source, list_name)
                if loop is not None:
                    loops.append((name, module, list_name, source, loop))
                    inside.append(f"{name}.{list_name}." if name else f"{list_name}.")
    if not loops:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no stack of decoder layers: no module's forward loops over a ModuleList "
            "and passes hidden states through it. resswap converts decoders such as LLaMA or GPT-2."
        )
    if len(loops) > 1:  # such as a vision tower's and a text decoder's
        get_decoder = getattr(model, "get_decoder", None)
        decoder = set(get_decoder().modules()) if get_decoder is not None else set()
        loops = [found for found in loops if found[1] in decoder] or loops
    if len(loops) > 1:
        names = ", ".join(".".join(filter(None, (name, list_name))) for name, _, list_name, _, _ in loops)
        raise UnsupportedModelError(
            f"{type(model).__name__} has more than one stack of layers ({names}), and none of them is the decoder's."
        )
    name, module, list_name, source, loop = loops[0]
    return Stack(module, name, list_name, loop.argument, _rewrite(source, loop))


def _find_loop(source: MethodSource, list_name: str) -> Loop | None:
    for statement in ast.walk(source.node):
        if isinstance(statement, ast.For) and any(_is_self_attribute(n, list_name) for n in ast.walk(statement.iter)):
            names = {node.id for node in ast.walk(statement.target) if isinstance(node, ast.Name)}
            for call in ast.walk(statement):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names:
                    return _loop(source, statement, call)
    return None


def _is_self_attribute(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _loop(source: MethodSource, statement: ast.For, call: ast.Call) -> Loop:
    keywords = {k.arg: k.value for k in call.keywords}
    argument: int | str = 0 if call.args else "hidden_states"
    passed = call.args[0] if call.args else keywords.get("hidden_states")
    if not isinstance(passed, ast.Name):
        raise UnsupportedModelError(f"The hidden states are not a variable in {source.at(call)}.")
    return Loop(statement, call, passed.id, argument)


def _rewrite(source: MethodSource, loop: Loop) -> str:
    edits = Edits(source.text)
    if not source.begins_line(loop.statement):
        raise UnsupportedModelError(f"The loop over the layers shares its line in {source.at(loop.statement.iter)}.")
    edits.insert_before(loop.statement, f"{loop.stream} = self.{EXPAND}({loop.stream})")
    edits.insert_after(loop.statement, f"{loop.stream} = self.{READOUT}({loop.stream})")
    _check_stores(source, loop)
    passed = loop.call.args[0] if loop.call.args else None
    for node in ast.walk(ast.Module(loop.statement.body, [])):
        if isinstance(node, ast.Return):
            raise UnsupportedModelError(f"The loop over the layers is left by a return in {source.at(node)}.")
        if isinstance(node, ast.Name) and node.id == loop.stream and isinstance(node.ctx, ast.Load):
            if node is not passed and node not in [k.value for k in loop.call.keywords]:
                edits.replace(node, f"self.{READOUT}({node.id})")
    return edits.apply()


def _check_stores(source: MethodSource, loop: Loop) -> None:
    """The stream may be reassigned from the layer's output only."""
    outputs = {id(loop.call)}
    output_names: set[str] = set()
    for statement in ast.walk(ast.Module(loop.statement.body, [])):
        if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        stored = {
            n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        value = statement.value
        while isinstance(value, ast.Subscript):
            value = value.value
        from_layer = id(value) in outputs or (isinstance(value, ast.Name) and value.id in output_names)
        if from_layer and not isinstance(statement, ast.AugAssign):
            output_names |= stored
        elif loop.stream in stored:
            raise UnsupportedModelError(
                f"Between two layers the hidden states are changed in {source.at(statement)}: not supported."
            )


def collapses_hidden_states(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the owner's `output_hidden_states` be hidden states, not streams.

    transformers records what the layers return; each entry is read out as the streams are after the last layer.
    """

    @functools.wraps(forward)
    def forward_with_hidden_states(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, PreTrainedModel):
            return forward(self, *args, **kwargs)
        return_dict = kwargs.pop("return_dict", None)
        outputs = forward(self, *args, return_dict=True, **kwargs)
        recorded = getattr(outputs, "hidden_states", None)
        if recorded is not None:
            readout = getattr(self, READOUT)
            outputs["hidden_states"] = tuple(None if state is None else readout(state) for state in recorded)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return outputs if return_dict else outputs.to_tuple()

    return forward_with_hidden_states
