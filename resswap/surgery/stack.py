"""Find the stack of decoder layers by its owner's loop, and rewrite that loop."""

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from resswap.errors import UnsupportedModelError

from .source import Edits, MethodSource

EXPAND, READOUT, MAP = "stream_expand", "stream_readout", "stream_map"
"""The attributes of the owner that begin and end the streams, and that change them between layers."""


@dataclass(frozen=True)
class Loop:
    """A loop `for layer in self.layers: hidden_states = layer(hidden_states, ...)` in a `forward`."""

    statement: ast.For
    call: ast.Call
    stream: str
    argument: int | str


@dataclass(frozen=True)
class Stack:
    """A stack of layers and the module that runs them.

    Attributes:
        owner: the module whose `forward` loops over the layers.
        recorder: the model whose `forward` records hidden states: the owner, or the model around it.
        owner_name, list_name: its name in the model, and its attribute that holds the layers.
        argument: where the loop passes the hidden states to a layer.
        text: the owner's new `forward`: streams are expanded before the loop and read out after it.
        maps: whether the loop changes the hidden states between layers: "linear", "norm" or not ("").
    """

    owner: nn.Module
    recorder: PreTrainedModel
    owner_name: str
    list_name: str
    argument: int | str
    text: str
    maps: str

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers in the order of depth, with their names in the model."""
        prefix = f"{self.owner_name}." if self.owner_name else ""
        for index, layer in enumerate(getattr(self.owner, self.list_name)):
            yield f"{prefix}{self.list_name}.{index}", layer


@dataclass(frozen=True)
class _Found:
    name: str
    owner: nn.Module
    list_name: str
    source: MethodSource
    loops: list[Loop] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"{self.name}.{self.list_name}".lstrip(".")


def find_stack(model: PreTrainedModel, tower: str = "decoder") -> Stack:
    """The one stack of layers in a model's decoder, or in the encoder beside it.

    Args:
        model: a decoder, or an encoder-decoder.
        tower: "decoder" or "encoder".

    Raises:
        UnsupportedModelError: there is none, or more than one, or its loop does what cannot be followed.
    """
    stacks: list[_Found] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{stack.path}.") for stack in stacks) or type(module).forward is nn.Module.forward:
            continue
        for list_name in _lists(module):
            source = MethodSource(type(module))
            loops = _find_loops(source, list_name)
            if loops:
                stacks.append(_Found(name, module, list_name, source, loops))
    if not stacks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no stack of decoder layers: no module's forward loops over a ModuleList "
            f"and passes hidden states through it. Looked for in {_where_layers_may_be(model)}. resswap converts "
            "decoders such as LLaMA or GPT-2."
        )
    chosen = _of_tower(model, stacks, tower)
    if len(chosen) != 1:
        where = "; ".join(f"{stack.path}, in {stack.source.at(stack.loops[0].statement.iter)}" for stack in stacks)
        raise UnsupportedModelError(
            f"{type(model).__name__} has more than one stack of layers, and none of them is the {tower}'s: {where}."
        )
    stack = chosen[0]
    text, maps = _rewrite(stack.source, stack.loops)
    recorder = _model_around(model, stack)
    return Stack(stack.owner, recorder, stack.name, stack.list_name, stack.loops[0].argument, text, maps)


def _lists(module: nn.Module) -> list[str]:
    """The names of the lists of modules that a module's own forward could run."""
    if isinstance(module, nn.ModuleList):
        return []
    return [name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child)]


def _where_layers_may_be(model: PreTrainedModel) -> str:
    """Where a forward uses a list of modules, in whatever way; else where the model's own forward is."""
    for module in model.modules():
        for list_name in _lists(module):
            source = MethodSource(type(module))
            use = next((node for node in ast.walk(source.node) if _is_self_attribute(node, list_name)), None)
            if use is not None:
                return source.at(use)
    return MethodSource(type(model)).where


def _model_around(model: PreTrainedModel, stack: _Found) -> PreTrainedModel:
    """The innermost `PreTrainedModel` that holds the stack."""
    models = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    around = [name for name in models if not name or f"{stack.path}.".startswith(f"{name}.")]
    return models[max(around, key=len)]


def _of_tower(model: PreTrainedModel, stacks: list[_Found], tower: str) -> list[_Found]:
    """Of several stacks, such as a vision tower's and a text decoder's, the decoder's, or the encoder's beside it."""
    if tower == "decoder":
        if len(stacks) == 1:
            return stacks
        part, text_config = model.get_decoder(), model.config.get_text_config(decoder=True)
    else:
        part, text_config = model.get_encoder(), model.config.get_text_config(encoder=True)
        if not model.config.is_encoder_decoder or part is model or len(stacks) == 1:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no encoder beside its decoder: leave `towers` out. Of its stacks "
                f"({', '.join(stack.path for stack in stacks)}) only the decoder's can be converted."
            )
    inside = set(part.modules())
    for rule in (
        lambda stack: stack.owner is part,
        lambda stack: stack.owner in inside and _model_around(model, stack).config is text_config,
        lambda stack: stack.owner in inside,
    ):
        chosen = [stack for stack in stacks if rule(stack)]
        if len(chosen) == 1:
            return chosen
    return stacks


def _find_loops(source: MethodSource, list_name: str) -> list[Loop]:
    """The innermost loops over `self.list_name` that call its elements."""
    loops = []
    for statement in ast.walk(source.node):
        if isinstance(statement, ast.For) and any(_is_self_attribute(n, list_name) for n in ast.walk(statement.iter)):
            names = {node.id for node in ast.walk(statement.target) if isinstance(node, ast.Name)}
            calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
            call = next((call for call in calls if call.func.id in names), None)
            loop = None if call is None else _loop(statement, call)
            if loop is not None:
                loops.append(loop)
    return loops


def _is_self_attribute(node: ast.AST, name: str) -> bool:
    is_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return is_self and node.attr == name


def _loop(statement: ast.For, call: ast.Call) -> Loop | None:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    passed = call.args[0] if call.args else keywords.get("hidden_states")
    if not isinstance(passed, ast.Name):
        return None
    return Loop(statement, call, passed.id, 0 if call.args else "hidden_states")


def _rewrite(source: MethodSource, loops: list[Loop]) -> tuple[str, str]:
    edits, kinds = Edits(source.text), set()
    for loop in loops:
        if not source.begins_line(loop.statement):
            raise UnsupportedModelError(f"The loop over the layers shares its line: {source.at(loop.statement.iter)}.")
        edits.insert_before(loop.statement, f"{loop.stream} = self.{EXPAND}({loop.stream})")
        edits.insert_after(loop.statement, f"{loop.stream} = self.{READOUT}({loop.stream})")
        kinds |= _rewrite_body(source, loop, edits)
    return edits.apply(), "norm" if "norm" in kinds else "".join(kinds)


def _rewrite_body(source: MethodSource, loop: Loop, edits: Edits) -> set[str]:
    """Uses of the streams other than by the layer get hidden states; what changes them is applied to each stream."""
    kinds, mapped = set(), set()
    for statement, kind in _changes(source, loop):
        edits.map_statement(statement, loop.stream, f"self.{MAP}")
        kinds.add(kind)
        mapped |= set(ast.walk(statement))
    passed = {*loop.call.args[:1], *(keyword.value for keyword in loop.call.keywords)}
    for node in ast.walk(ast.Module(loop.statement.body, [])):
        if isinstance(node, ast.Return):
            raise UnsupportedModelError(f"The loop over the layers is left by a return in {source.at(node)}.")
        is_read = isinstance(node, ast.Name) and node.id == loop.stream and isinstance(node.ctx, ast.Load)
        if is_read and node not in passed | mapped:
            edits.replace(node, f"self.{READOUT}({node.id})")
    return kinds


def _changes(source: MethodSource, loop: Loop) -> Iterator[tuple[ast.Assign, str]]:
    """The statements that change the hidden states between layers, with what kind of function they apply."""
    outputs: set[str] = set()
    for statement in ast.walk(ast.Module(loop.statement.body, [])):
        if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        if not isinstance(statement, ast.AugAssign) and _comes_from(statement.value, loop.call, outputs):
            outputs |= stored
        elif loop.stream in stored:
            target = targets[0]
            first = target.elts[0] if isinstance(target, ast.Tuple) else target
            if not isinstance(statement, ast.Assign) or not isinstance(first, ast.Name) or first.id != loop.stream:
                raise UnsupportedModelError(f"Between layers the hidden states change in {source.at(statement)}.")
            linear = isinstance(statement.value, ast.BinOp) and isinstance(statement.value.op, (ast.Mult, ast.Div))
            yield statement, "linear" if linear else "norm"


def _comes_from(value: ast.expr | None, call: ast.Call, names: set[str]) -> bool:
    """Whether an expression is the output of `call`, a variable of `names`, or an element of one of them."""
    while isinstance(value, ast.Subscript):
        value = value.value
    if isinstance(value, ast.IfExp):
        return _comes_from(value.body, call, names) and _comes_from(value.orelse, call, names)
    return value is call or (isinstance(value, ast.Name) and value.id in names)


def collapses_hidden_states(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a model's `output_hidden_states` be hidden states, not streams.

    transformers records what the layers return; each entry is read out as the streams are after the last layer. A
    forward that takes `return_dict` itself collects hidden states in its loop, where they are read out already.
    """
    if "return_dict" in inspect.signature(forward).parameters:
        return forward

    @functools.wraps(forward)
    def forward_with_hidden_states(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return_dict = kwargs.pop("return_dict", None)
        outputs = forward(self, *args, return_dict=True, **kwargs)
        recorded = getattr(outputs, "hidden_states", None)
        if recorded is not None:
            readout = next(getattr(module, READOUT) for module in self.modules() if hasattr(module, READOUT))
            outputs["hidden_states"] = tuple(None if state is None else readout(state) for state in recorded)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return outputs if return_dict else outputs.to_tuple()

    return forward_with_hidden_states
