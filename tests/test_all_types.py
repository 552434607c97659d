"""Every causal language model type of transformers, as a tiny random model: it converts exactly, or is refused.

`tiny_configs.json` has the config of a model that runs, by type.
"""

import copy
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from test_refusals import assert_unchanged, snapshot
from tiny import new_parameters, randomise_connections
from torch.utils._pytree import tree_map
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig
from transformers.models.musicgen.modeling_musicgen import MusicgenForCausalLM
from transformers.models.musicgen_melody.configuration_musicgen_melody import MusicgenMelodyDecoderConfig
from transformers.models.musicgen_melody.modeling_musicgen_melody import MusicgenMelodyForCausalLM

import resswap
from resswap.preconditions import OWN_MECHANISMS

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
    "xlnet": r"What the layer returns is not the residual stream in .*\.XLNetLayer\.forward",
    "zaya": r"A parameter is added to the residual stream in .*\.ZayaResidualScaling\.forward",
}
SUPPORTED = sorted(set(CONFIGS) - set(OWN_MECHANISMS) - set(REFUSED))


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
        for weight in head.parameters():
            weight *= max(1.0, 3 / largest)
    return model, inputs


def make_inputs(model_type, model):
    if model_type.endswith("_assistant"):  # reads the keys and values of the model that it assists
        kinds = ("full_attention", "sliding_attention")
        keys_and_values = {kind: (torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)) for kind in kinds}
        return {"inputs_embeds": torch.randn(2, 1, 128), "shared_kv_states": keys_and_values}
    rows = 2 * model.config.num_codebooks if model_type in MUSICGEN else 2
    return {"input_ids": torch.randint(3, 100, (rows, 12))}


def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


def greedy(model, inputs, use_cache=True):
    """The logits of five greedy steps; None where the original does not generate from these inputs."""
    generates = model.can_generate() and set(inputs) == {"input_ids"} and not hasattr(model.config, "num_codebooks")
    if not generates:
        return None
    # RWKV's own cached step mixes up the rows of a batch.
    ids = inputs["input_ids"][:1]
    options = dict(max_new_tokens=5, do_sample=False, use_cache=use_cache, eos_token_id=None, pad_token_id=0)
    output = model.generate(ids, **options, output_logits=True, return_dict_in_generate=True)
    return torch.stack(output.logits)


def hidden_states(model, inputs):
    return getattr(model(**inputs, use_cache=False, output_hidden_states=True), "hidden_states", None)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_converts_and_behaves(model_type):
    model, inputs = build(model_type)
    before, hidden_before = look(model, inputs, logits), look(model, inputs, hidden_states)
    steps_before, error_before = greedy(model, inputs), cache_error(model, inputs)
    dtype_before = dtype_in_bfloat16(model, inputs)
    resswap.convert(model)
    assert before.abs().max() > 1
    assert (look(model, inputs, logits) - before).abs().max() <= 1e-5 * before.abs().max()
    if steps_before is not None:
        assert torch.equal(greedy(model, inputs).argmax(-1), steps_before.argmax(-1))
    if hidden_before:
        assert [h.shape for h in look(model, inputs, hidden_states)] == [h.shape for h in hidden_before]
    assert dtype_in_bfloat16(model, inputs) == dtype_before

    randomise_connections(model, std=0.1)
    assert cache_error(model, inputs) <= 10 * error_before + 1e-4
    assert_gradients(model, inputs)


def assert_gradients(model, inputs):
    """They are finite, every connection that ran has some, and checkpointing gives the same."""
    model.train()
    expected = gradients(model, inputs)
    for name, connection in resswap.connections(model).items():
        executed = [
            expected[f"{name}.{key}"] for key, _ in connection.named_parameters() if f"{name}.{key}" in expected
        ]
        assert not executed or any(gradient.abs().max() > 0 for gradient in executed), name
    assert all(gradient.isfinite().all() for gradient in expected.values())
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for name, gradient in gradients(model, inputs).items():
            largest = expected[name].abs().max().item()
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4 * largest)


@torch.no_grad()
def look(model, inputs, at):
    return at(model, inputs)


def dtype_in_bfloat16(model, inputs):
    """The dtype of the logits of the model in bfloat16, or the error that it ends in."""
    inputs = tree_map(lambda t: t.bfloat16() if t.is_floating_point() else t, inputs)
    try:
        return look(copy.deepcopy(model).bfloat16(), inputs, logits).dtype
    except RuntimeError as error:
        return str(error)


@torch.no_grad()
def cache_error(model, inputs):
    """How far the logits of greedy steps with and without a cache differ, relative to their size."""
    cached, uncached = greedy(model, inputs), greedy(model, inputs, use_cache=False)
    return 0.0 if cached is None else ((cached - uncached).abs().max() / cached.abs().max()).item()


def gradients(model, inputs):
    """Of all parameters of connections that were used."""
    model.zero_grad()
    torch.manual_seed(0)
    logits(model, inputs).sin().sum().backward()
    return {name: p.grad.clone() for name, p in new_parameters(model).items() if p.grad is not None}


@pytest.mark.parametrize("model_type", sorted({*OWN_MECHANISMS, *REFUSED}))
def test_is_refused_with_class_line_and_reason(model_type, monkeypatch):
    if model_type == "gemma3n":
        model, inputs = build_gemma3n(monkeypatch)
    else:
        model, inputs = build(model_type)
    before = snapshot(model)
    with torch.no_grad():
        expected = logits(model, inputs)
    reason = REFUSED.get(model_type) or f"a residual mechanism of its own: {re.escape(OWN_MECHANISMS[model_type])}"
    with pytest.raises(resswap.UnsupportedModelError) as caught:
        resswap.convert(model)
    assert re.search(reason, str(caught.value))
    module, class_name, line = re.search(
        r"(transformers\.models\.\w+\.modeling_\w+)\.(\w+).*?line (\d+)", str(caught.value)
    ).groups()
    assert module == type(model).__module__
    source, first_line = inspect.getsourcelines(getattr(sys.modules[module], class_name))
    assert first_line <= int(line) < first_line + len(source)
    assert_unchanged(model, before)
    with torch.no_grad():
        assert torch.equal(logits(model, inputs), expected)


def build_gemma3n(monkeypatch):
    """Without its vision tower, which another package defines."""
    make = AutoModel.from_config

    def make_all_but_vision(config):
        return torch.nn.Identity() if config.model_type == "gemma3n_vision" else make(config)

    monkeypatch.setattr(AutoModel, "from_config", make_all_but_vision)
    config = CONFIG_MAPPING["gemma3n"](text_config=CONFIGS["gemma3n_text"], audio_config={"conf_num_hidden_layers": 1})
    return AutoModelForCausalLM.from_config(config).eval(), {"input_ids": torch.randint(3, 100, (2, 12))}


def test_no_type_is_left_out():
    known = set(SUPPORTED) | set(OWN_MECHANISMS) | set(REFUSED)
    assert known == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(SUPPORTED) >= 180
