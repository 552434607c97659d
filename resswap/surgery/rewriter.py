"""Write the new text of the methods that a trace has walked through."""

import ast
import textwrap
from collections.abc import Iterator

from torch import nn

from resswap.errors import UnsupportedModelError

from .rewrite import Rewrite, begins
from .source import INDENT, Edits
from .stream import Path, Stream, Use
from .trace import Trace


class Rewriter:
    """Rewrites one method and, through it, those that it calls.

    Args:
        rewrite: collects what is planned.
        trace: the walk through the method.
        at_entry: whether the streams have just begun when they come in.
        lent: whether the parameter is not the streams, but the function that adds to them.
    """

    def __init__(self, rewrite: Rewrite, trace: Trace, at_entry: bool, lent: bool = False) -> None:
        self.rewrite, self.trace, self.at_entry = rewrite, trace, at_entry
        self.edits = Edits(trace.source.text)
        self.lent = trace.streams[0] if lent else None
        self.collapse = ""
        self.fresh: set[str] = set()

    def run(self) -> str:
        """Plan the sites and the methods of what is called; returns the new text."""
        carried = {use.result for stream in self.trace.streams if (use := self._carried(stream))}
        maps: list[tuple[Use, str]] = []
        for use in sorted((use for stream in self.trace.streams for use in stream.uses), key=lambda use: use.order):
            stream = use.stream
            if use is stream.uses[0] and stream not in carried:
                self._start(stream)
            if use.unit is not None:
                self._call(use)
            if use.kind == "map" and use is not self._carried(stream):
                maps.append((use, self._map_site(use)))
        for use, site in maps:  # the innermost come first
            self._map(use, site)
        return self.edits.apply()

    # branches

    def _carried(self, stream: Stream) -> Use | None:
        """The map through which an open branch's add goes on, as in `residual * alpha + y`."""
        maps = stream.of_kind("map")
        if len(maps) != 1 or stream.of_kind("add", "lend") or not _reaches_add(maps[0]):
            return None
        origin = stream.origin
        from_open = origin is not None and origin.kind == "map" and self._carried(origin.stream) is origin
        return maps[0] if stream is self.lent or stream.of_kind("read") or from_open else None

    def _chain(self, stream: Stream) -> Iterator[Stream]:
        """A stream and those that it is carried on to."""
        yield stream
        if use := self._carried(stream):
            yield from self._chain(use.result)

    def _start(self, stream: Stream) -> None:
        """Open the connection of a stream that is added to, and close it at each add."""
        chain = list(self._chain(stream))
        if stream is self.lent:
            self._close_all(chain, add_name="")
        elif any(link.of_kind("add", "lend") for link in chain):
            self._close_all(chain, add_name=self._open(stream, chain))
        else:
            for read in (use for use in stream.of_kind("read") if not use.of_all):
                self.collapse = self.collapse or self.rewrite.add_site(
                    self.trace.module, "stream_map", "linear", False
                )
                self.edits.replace(read.node, f"self.{self.collapse}({read.node.id})")

    def _open(self, stream: Stream, chain: list[Stream]) -> str:
        """Returns the variable that holds the add, or "" if it is the one that held the stream."""
        site = self._connection_site(stream, chain)
        path = self._opening(chain)
        alias = self._alias_that_opens(stream, path, carried=len(chain) > 1)
        if alias is not None:
            # `residual = hidden_states` is where the branch begins: its names serve for the input and the add.
            branch, add_name = alias.value.id, alias.targets[0].id
            self.edits.replace(alias, f"{branch}, {add_name} = self.{site}({branch})")
            return ""
        prefix = site.partition("connection")[0] or "branch_"
        branch, add_name = (self._fresh(prefix + word) for word in ("input", "add"))
        self.fresh |= {branch, add_name}
        self.edits.insert_before(_statement(path), f"{branch}, {add_name} = self.{site}({_holder(stream)})")
        for read in stream.of_kind("read"):
            self.edits.replace(read.node, branch)
        return add_name

    def _alias_that_opens(self, stream: Stream, path: Path, carried: bool) -> ast.Assign | None:
        aliases = stream.of_kind("alias")
        alias = aliases[0].node if len(aliases) == 1 else None
        if alias is None or alias is not _statement(path):
            return None
        flows = ("pass", "enter") if carried else ("pass", "enter", "map")
        takers = [use.node if use.kind == "lend" else use.operand for use in stream.of_kind("add", "lend", "map")]
        names_serve = all(isinstance(taker, ast.Name) and taker.id == alias.targets[0].id for taker in takers)
        reads_serve = all(read.node.id == alias.value.id for read in stream.of_kind("read"))
        return alias if names_serve and reads_serve and not self.trace.flows_on(stream, path, flows) else None

    def _close_all(self, chain: list[Stream], add_name: str) -> None:
        """The first stream's add is `add_name`, or what its own variable holds; the others' is in their variables."""
        names = [add_name] + [""] * (len(chain) - 1)
        for index, link in enumerate(chain):
            carried = self._carried(link)
            if carried is not None and not self._is_term(carried):
                self.edits.replace(carried.node, self._through(carried, names[index]))
            for use in link.of_kind("lend"):
                self.edits.replace(use.node, names[index] or use.node.id)
            for use in link.of_kind("add"):
                if isinstance(use.operand, ast.Name):
                    function = names[index] or use.operand.id
                else:
                    function = self._through(link.origin, names[index - 1])
                self._close(use, function)

    def _is_term(self, carried: Use) -> bool:
        """Whether a map is itself the term of the sum, without a variable in between."""
        return any(add.operand is carried.node for add in carried.result.of_kind("add"))

    def _through(self, use: Use, add_name: str) -> str:
        before, name, after = self.edits.around(use.node, use.operand)
        variable = self._fresh("stream")
        return f"{add_name or name}.through(lambda {variable}: {before}{variable}{after})"

    def _close(self, use: Use, function: str) -> None:
        """`residual + f(x)` becomes `residual(f(x))`: the stream's own term goes, the others stay where they are."""
        node = use.node
        if isinstance(node, ast.AugAssign):
            target, value = node.target.id, node.value
            if use.operand is value:  # y += residual
                self.edits.replace(node, f"{target} = {function}({target})")
            else:  # residual += f(x)
                self.edits.replace_between(node.target, value, f"{target} = {function}(")
                self.edits.insert_at_end(node, ")")
            return
        self.edits.insert_at_start(node, f"{function}(")
        self.edits.remove_term(use.operand, use.others)
        self.edits.insert_at_end(node, ")")

    # calls and maps

    def _call(self, use: Use) -> None:
        """Rewrite what is called; a helper function becomes a static method."""
        unit, name = use.unit, use.unit.source.function.__name__
        helper = unit.source.offset == 0
        if helper and use.kind == "enter":
            raise UnsupportedModelError(f"A helper function reads the residual stream in {unit.source.name}.")
        sites = len(self.rewrite.sites)
        entry = use.kind == "enter" and begins(use.stream, self.at_entry)
        text = Rewriter(self.rewrite, unit, entry, lent=use.kind == "lend").run()
        if helper:
            text = f"{INDENT}@staticmethod\n{textwrap.indent(text, INDENT)}"
            self.edits.replace(use.call.func, f"self.{name}")
        module = self.trace.module if helper else unit.module
        self.rewrite.add_method(module, name, text, has_sites=len(self.rewrite.sites) > sites)

    def _map_site(self, use: Use) -> str:
        name = use.node.func.attr if use.result.norm else "stream"
        kind = "norm" if use.result.norm else "linear"
        return self.rewrite.add_site(self.trace.module, f"{name}_map", kind, begins(use.stream, self.at_entry))

    def _map(self, use: Use, site: str) -> None:
        """`self.norm(streams)` becomes `self.norm_map(streams, self.norm)`."""
        node, variable = use.node, self._fresh("stream")
        if isinstance(node, ast.AugAssign):
            target = node.target.id
            before, value, after = self.edits.around(node.value, node.value)
            operator = "*" if isinstance(node.op, ast.Mult) else "/"
            self.edits.replace(
                node, f"{target} = self.{site}({target}, lambda {variable}: {variable} {operator} ({value}))"
            )
            return
        before, streams, after = self.edits.around(node, use.operand)
        is_module = isinstance(node, ast.Call) and node.args == [use.operand] and not node.keywords
        function = (
            self.trace.source.segment(node.func) if is_module else f"lambda {variable}: {before}{variable}{after}"
        )
        self.edits.replace(node, f"self.{site}({streams}, {function})")

    # names and places

    def _connection_site(self, stream: Stream, chain: list[Stream]) -> str:
        """`attn_connection` for the add that `self_attn` serves: the largest module called within the branch."""
        start, end = stream.uses[0].order, max(use.order for link in chain for use in link.of_kind("add", "lend"))
        called = [name for order, name in self.trace.calls if start <= order <= end + 1]
        sizes = {name: _num_parameters(getattr(self.trace.module, name, None)) for name in called}
        sublayer = max(sizes, key=sizes.get, default="")
        name = f"{sublayer.removeprefix('self_')}_connection" if sizes.get(sublayer) else "connection"
        begun = begins(stream, self.at_entry)
        return self.rewrite.add_site(self.trace.module, name, "connection", begun, tuple(called))

    def _opening(self, chain: list[Stream]) -> Path:
        """The innermost statement that comes before, or contains, every use of the streams."""
        uses = [use for link in chain for use in link.uses]
        common = uses[0].path
        for use in uses[1:]:
            depth = 0
            for (block, index), (other, other_index) in zip(common, use.path, strict=False):
                if block is not other:
                    break
                depth += 1
                common = (*common[: depth - 1], (block, min(index, other_index)), *common[depth:])
                if index != other_index:
                    break
            common = common[:depth]
        while not self.trace.source.begins_line(_statement(common)):  # an elif, or behind a colon
            common = common[:-1]
        return common

    def _fresh(self, name: str) -> str:
        taken = {node.id for node in ast.walk(self.trace.source.node) if isinstance(node, ast.Name)}
        taken |= {node.arg for node in ast.walk(self.trace.source.node) if isinstance(node, ast.arg)}
        while name in taken | self.fresh:
            name += "_"
        return name


def _reaches_add(use: Use) -> bool:
    """Whether what a map gives is only added to, after further maps or not. A norm cannot be carried."""
    result = use.result
    if result.norm or result.of_kind("read", "enter", "pass"):
        return False
    return bool(result.of_kind("add", "lend")) or any(_reaches_add(further) for further in result.of_kind("map"))


def _statement(path: Path) -> ast.stmt:
    block, index = path[-1]
    return block[index]


def _holder(stream: Stream) -> str:
    """The variable that holds the stream when it is first used."""
    use = stream.uses[0]
    if use.kind == "alias":
        return use.node.value.id
    node = use.operand if use.kind in ("add", "map") else use.node
    if not isinstance(node, ast.Name):
        raise UnsupportedModelError(f"The residual stream has no variable of its own at line {node.lineno}.")
    return node.id


def _num_parameters(module: object) -> int:
    return sum(p.numel() for p in module.parameters()) if isinstance(module, nn.Module) else 0
