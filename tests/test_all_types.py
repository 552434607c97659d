"""Every causal language model type of transformers, as a tiny random model: it converts exactly, or is refused.

`tiny_configs.json` has the config of a model that runs, by type.
"""

import json
from pathlib import Path

import pytest
import torch
from tiny import new_parameters, randomise_connections
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import resswap
from resswap.preconditions import OWN_MECHANISMS

from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig
from transformers.models.musicgen.modeling_musicgen import MusicgenForCausalLM
from transformers.models.musicgen_melody.configuration_musicgen_melody import MusicgenMelodyDecoderConfig
from transformers.models.musicgen_melody.modeling_musicgen_melody import MusicgenMelodyForCausalLM

MUSICGEN = {
    "musicgen": (MusicgenDecoderConfig, MusicgenForCausalLM),
    "musicgen_melody": (MusicgenMelodyDecoderConfig, MusicgenMelodyForCausalLM),
}
CONFIGS = json.loads((Path(__file__).parent / "tiny_configs.json").read_text())
# What cannot be converted besides those with a residual mechanism of their own, and why.
REFUSED = {
    "blt": "more than one stack of layers",
    "hrm_text": "more than one stack of layers",
    "xlm": "no stack of decoder layers",
    "xlnet": r"XLNetLayer\.forward .*line \d+",
    "zaya": r"ZayaDecoderLayer\.forward .*line \d+",
}
SUPPORTED = sorted(set(CONFIGS) - set(OWN_MECHANISMS) - set(REFUSED))
# These draw at random or choose experts by a hair's breadth: a rounding error decides.
CHAOTIC: set[str] = set()


def build(model_type):
    """A model in evaluation mode whose logits exceed 1, without dropout, and inputs for it."""
    torch.manual_seed(0)
    kwargs = dict(CONFIGS[model_type])
    if model_type in MUSICGEN:  # the decoder has a config class of its own, which the Auto class does not know
        config_class, model_class = MUSICGEN[model_type]
        model = model_class(config_class(**kwargs["decoder"]))
    else:
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**kwargs))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.eval()
    inputs = make_inputs(model_type, model)
    with torch.no_grad():
        largest = logits(model, inputs).abs().max()
        head = model.get_output_embeddings() or model.lm_head
        for weight in head.parameters() if head is not None else ():
            weight *= max(1.0, 3 / largest)
    return model, inputs


def make_inputs(model_type, model):
    if model_type.endswith("_assistant"):  # reads the keys and values of the model that it assists
        keys = {kind: (torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)) for kind in ("full_attention", "sliding_attention")}
        return {"inputs_embeds": torch.randn(2, 12, 128), "shared_kv_states": keys}
    rows = 2 * getattr(model.config, "num_codebooks", 1) if model_type.startswith("musicgen") else 2
    return {"input_ids": torch.randint(3, 100, (rows, 12))}


def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_converts(model_type):
    model, inputs = build(model_type)
    with torch.no_grad():
        before = logits(model, inputs)
        hidden = getattr(model(**inputs, use_cache=False, output_hidden_states=True), "hidden_states", None)
        tokens = greedy(model, inputs)
        resswap.convert(model)
        after = logits(model, inputs)
        assert (after - before).abs().max() <= 1e-5 * before.abs().max()
        if tokens is not None:
            assert torch.equal(greedy(model, inputs), tokens)
        if hidden:
            shown = model(**inputs, use_cache=False, output_hidden_states=True).hidden_states
            assert [h.shape for h in shown] == [h.shape for h in hidden]


def greedy(model, inputs):
    if not set(inputs) <= {"input_ids"} or not model.can_generate() or inputs["input_ids"].shape[0] > 2:
        return None
    return model.generate(**inputs, max_new_tokens=4, do_sample=False)
