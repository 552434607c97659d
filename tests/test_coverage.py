"""`resswap.support`: which models convert, from their source alone."""

import re
from pathlib import Path

import pytest
from test_all_types import REFUSED, SUPPORTED
from tiny import CONFIGS, tiny
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import resswap
from resswap.preconditions import OWN_MECHANISMS

ROOT = Path(__file__).parents[1]


def test_one_type_a_config_and_a_model_say_the_same():
    expected = resswap.Support("llama", True, "adds in the layer", 2.0)
    model = tiny("llama")
    for which in ("llama", LlamaConfig(**CONFIGS["llama"]), model):
        assert resswap.support(which) == expected
    assert resswap.connections(model) == {} and not hasattr(model.config, "residual")


@pytest.mark.parametrize(
    ("model_type", "pattern", "connections"),
    [
        ("bert", "adds in submodules or helpers, norms on the stream", 2.0),
        ("bart", "adds in the layer, norms on the stream", 3.0),
        ("bloom", "adds in submodules or helpers", 2.0),
        ("mamba", "adds in the layer, scales, casts or reshapes of the stream", 1.0),
        ("gptj", "adds in the layer", 1.0),
        ("t5", "adds in submodules or helpers, scales, casts or reshapes of the stream", 3.0),
    ],
)
def test_patterns(model_type, pattern, connections):
    assert resswap.support(model_type) == resswap.Support(model_type, True, pattern, connections)


def test_refusals():
    assert resswap.support("deepseek_v4").reason.endswith("of its own: manifold-constrained hyper-connections")
    assert not resswap.support("xlnet").supported and "XLNetLayer.forward" in resswap.support("xlnet").reason
    with pytest.raises(resswap.OptionError, match="no causal or sequence-to-sequence language model of type 'vit'"):
        resswap.support("vit")
    assert not resswap.support(resswap.convert(tiny("llama"))).supported


def test_the_whole_table_and_what_the_documents_say():
    table = resswap.support()
    assert [row.model_type for row in table] == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    refused = {row.model_type for row in table if row.supported is False}
    assert refused == set(OWN_MECHANISMS) | set(REFUSED)
    assert {row.model_type for row in table if row.supported} <= set(SUPPORTED)
    assert all(row.reason for row in table if not row.supported)
    assert (ROOT / "SUPPORTED_MODELS.md").read_text().endswith(f"\n\n{table}\n")
    said = re.search(r"Of the (\d+) causal-LM types .* of (\d+) convert exactly", (ROOT / "README.md").read_text())
    assert said.groups() == (str(len(table)), str(len(SUPPORTED)))
