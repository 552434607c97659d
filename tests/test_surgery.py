"""Reading and rewriting the forward of a layer, on the small layers of `small_layers`."""

import traceback

import pytest
import torch
from small_layers import (
    AddInBothWays,
    AliasUsedElsewhere,
    Augmented,
    Base,
    BertLike,
    CallArguments,
    CallsSuper,
    Decorated,
    Flags,
    Helper,
    Inherits,
    Listed,
    MaybeNothing,
    NoAlias,
    Plain,
    PostNorm,
    Reshaped,
    ScaledBranches,
    ScaledStream,
    ThreeTerms,
    UsedAfterASum,
    scaled_add,
)
from torch import nn

from resswap.errors import UnsupportedModelError
from resswap.schemes.streams import StreamMap, StreamsAdd
from resswap.surgery import original_class, rewrite_layer, rewritten_class, source_diff


class PlainAdd(nn.Module):
    """A connection that is the residual add itself, and counts its adds."""

    def __init__(self):
        super().__init__()
        self.adds = 0

    def forward(self, streams):
        return streams.mean(-2), StreamsAdd(streams, self.write)

    def write(self, streams, y):
        self.adds += 1
        return streams + y.unsqueeze(-2)


def operated(layer, argument=0):
    rewrite = rewrite_layer(layer, argument)
    for site in rewrite.sites:
        site.module.add_module(site.name, PlainAdd() if site.kind == "connection" else StreamMap())
    for module, methods in rewrite.methods.items():
        module.__class__ = rewritten_class(type(module), tuple(methods.items()))
    return rewrite


@pytest.mark.parametrize(
    ("layer_class", "sites"),
    [
        (Plain, ["attn_connection", "mlp_connection"]),
        (Inherits, ["attn_connection", "mlp_connection"]),
        (ScaledBranches, ["attn_connection", "mlp_connection"]),
        (NoAlias, ["attn_connection", "mlp_connection"]),
        (AliasUsedElsewhere, ["attn_connection"]),
        (Augmented, ["attn_connection", "mlp_connection"]),
        (ThreeTerms, ["attn_connection"]),
        (Flags, ["attn_connection", "mlp_connection"]),
        (CallArguments, ["attn_connection", "mlp_connection", "mlp_connection_1"]),
        (AddInBothWays, ["mlp_connection"]),
        (MaybeNothing, ["mlp_connection"]),
        (CallsSuper, ["connection"]),
        (Decorated, ["mlp_connection"]),
        (PostNorm, ["attn_connection", "norm_map", "mlp_connection", "norm_map_1"]),
        (ScaledStream, ["attn_connection", "mlp_connection", "stream_map"]),
        (Reshaped, ["stream_map", "stream_map_1", "mlp_connection", "stream_map_2"]),
        (UsedAfterASum, ["mlp_connection"]),
        (Helper, ["attn_connection", "mlp_connection"]),
        (BertLike, ["output_connection", "norm_map", "output_connection", "norm_map"]),
        (Listed, ["output_connection", "norm_map", "stream_map", "stream_map_1", "mlp_connection", "norm_map"]),
    ],
)
@pytest.mark.parametrize("other", [None, 0.7])
def test_each_add_is_a_connection_and_the_function_stays(layer_class, sites, other):
    layer, x = layer_class(), torch.randn(2, 3, 8)
    arguments = (x.clone(), other) if "other" in layer_class.forward.__code__.co_varnames else (x.clone(),)
    expected = layer(*arguments)
    rewrite = operated(layer)
    assert [site.name for site in rewrite.sites] == sites
    actual = layer(torch.stack([x, x], dim=-2), *arguments[1:])  # two streams
    actual, expected = (value[0] if isinstance(value, (tuple, list)) else value for value in (actual, expected))
    torch.testing.assert_close(actual, torch.stack([expected, expected], dim=-2))
    optional = {CallArguments: "mlp_connection", MaybeNothing: "mlp_connection"}.get(layer_class)
    for site in rewrite.sites:
        if site.kind == "connection":
            adds = getattr(site.module, site.name).adds
            assert adds == (0 if site.name == optional and other is None else 1)


def test_the_rewritten_text_keeps_comments_and_layout():
    layer = Plain()
    operated(layer)
    assert source_diff(type(layer)).splitlines()[3:] == [
        "     def forward(self, hidden_states, other=None):",
        "-        residual = hidden_states  # the read",
        "+        hidden_states, residual = self.attn_connection(hidden_states)  # the read",
        "         hidden_states = self.norm(hidden_states)",
        "         hidden_states = self.self_attn(hidden_states)",
        "-        hidden_states = residual + hidden_states  # the add",
        "+        hidden_states = residual(hidden_states)  # the add",
        " ",
        "         # Fully connected: ü",
        "-        residual = hidden_states",
        "+        hidden_states, residual = self.mlp_connection(hidden_states)",
        "         hidden_states = self.mlp(self.norm(hidden_states))",
        "-        hidden_states = hidden_states + residual",
        "+        hidden_states = residual(hidden_states)",
        "         return hidden_states",
    ]


def test_the_new_class_is_a_subclass_of_the_same_name_and_shared():
    first, second = Plain(), Plain()
    operated(first), operated(second)
    new = type(first)
    assert new is type(second) and issubclass(new, Plain) and original_class(new) is Plain
    assert (new.__name__, new.__qualname__, new.__module__) == ("Plain", "Plain", Plain.__module__)
    assert Plain().forward.__func__ is Plain.forward


def test_tracebacks_show_the_rewritten_line():
    layer = Plain()
    operated(layer)
    with pytest.raises(RuntimeError) as caught:
        layer(torch.randn(2, 3, 2, 7))
    assert "self.norm(hidden_states)" in "".join(traceback.format_tb(caught.tb))


class OneOfTwo(Base):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = residual + self.mlp(hidden_states)
        hidden_states = torch.add(hidden_states, self.self_attn(hidden_states))
        return hidden_states


class NoAdd(Base):
    def forward(self, hidden_states):
        return hidden_states


class AddInALoop(Base):
    def forward(self, hidden_states):
        for _ in range(2):
            hidden_states = hidden_states + self.mlp(hidden_states)
        return hidden_states


class Sometimes(Base):
    def forward(self, hidden_states, other=None):
        residual = hidden_states
        if other is None:
            residual = self.norm(hidden_states)
        hidden_states = residual + self.mlp(hidden_states)
        return hidden_states


class StoredAway(Base):
    def forward(self, hidden_states):
        self.last = hidden_states
        hidden_states = hidden_states + self.mlp(hidden_states)
        return hidden_states


class BiasOnTheStream(Base):
    def forward(self, hidden_states):
        hidden_states = hidden_states + self.mlp.bias
        return hidden_states


class Returnless(Base):
    def forward(self, hidden_states):
        hidden_states = hidden_states + self.mlp(hidden_states)


@pytest.mark.parametrize(
    ("layer_class", "line"),
    [
        (BiasOnTheStream, "hidden_states + self.mlp.bias"),
        (OneOfTwo, "return hidden_states"),
        (NoAdd, ""),
        (AddInALoop, "hidden_states"),
        (Sometimes, "residual"),
        (StoredAway, "self.last = hidden_states"),
        (Returnless, ""),
    ],
)
def test_what_cannot_be_followed_is_an_error_with_class_line_and_source(layer_class, line):
    with pytest.raises(UnsupportedModelError) as caught:
        rewrite_layer(layer_class(), 0)
    message = str(caught.value)
    assert f"{layer_class.__name__}.forward" in message
    if line:
        assert f'"{line}"' in message and "test_surgery.py, line" in message


def test_a_post_norm_and_submodules_as_text():
    layer = BertLike()
    operated(layer)
    changed = [line[1:].strip() for line in source_diff(type(layer.output)).splitlines()[3:] if line[0] in "+-"]
    assert changed == [
        "return self.norm(self.dense(hidden_states) + input_tensor)",
        "return self.norm_map(input_tensor(self.dense(hidden_states)), self.norm)",
    ]


def test_what_all_streams_have_in_common_is_asked_of_them_as_they_are():
    layer = Listed()
    operated(layer)
    changed = [line[1:].strip() for line in source_diff(type(layer)).splitlines()[3:] if line[0] == "+"]
    assert changed[:2] == [
        "largest = self.stream_map(hidden_states).abs().max()",
        "hidden_states = self.stream_map_1(hidden_states, "
        "lambda stream: torch.clamp(stream, min=-0.9 * largest, max=0.9 * largest))",
    ]


def test_a_helper_function_becomes_a_static_method():
    layer = Helper()
    operated(layer)
    assert "x = residual.through(lambda stream: stream * 0.5)(x)" in source_diff(type(layer))
    assert scaled_add(1.0, 4.0, 3.0) == 5.0


def test_where_streams_begin():
    assert [site.begins for site in rewrite_layer(PostNorm(), 0, True).sites if site.kind == "connection"] == [
        True
    ] * 2
    assert rewrite_layer(PostNorm(), 0).begins and not rewrite_layer(Plain(), 0, True).begins
    assert [site.begins for site in rewrite_layer(Plain(), 0, True).sites] == [True, False]
    assert [site.begins for site in rewrite_layer(Plain(), 0, False).sites] == [False, False]


def test_an_argument_that_is_not_there():
    with pytest.raises(UnsupportedModelError, match="no parameter 'states'"):
        rewrite_layer(Plain(), "states")
