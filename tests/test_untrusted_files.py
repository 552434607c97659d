"""A file that does not fit is one clear error that names it; no file of a checkpoint runs code."""

import json
import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import SCHEMES, randomise_connections, tiny
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import resswap
from resswap.configuration import described_scheme
from resswap.hub import ResswapConfig


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = resswap.convert(tiny("llama"), num_streams=3)
    randomise_connections(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "edited")


def edit_residual(folder, **residual):
    config = json.loads((folder / "config.json").read_text())
    config["residual"].update(residual)
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder, **tensors):
    weights = load_file(folder / "model.safetensors")
    weights.update(tensors)
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder, auto_class=AutoModelForCausalLM, **arguments):
    with pytest.raises(resswap.CheckpointError) as caught:
        auto_class.from_pretrained(folder, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        ({"scheme": "nonsense"}, "residual: There is no scheme 'nonsense'; available: "),
        ({"scheme": 3}, "residual.scheme is 3, not a str"),
        ({"format_version": 99}, "residual.format_version is 99, newer"),
        ({"format_version": 0}, "residual.format_version is 0; the first one is 1"),
        ({"format_version": True}, "residual.format_version is True, not a int"),
        ({"options": {"num_streams": 0}}, "num_streams=0; allowed: a whole number from 2"),
        ({"options": {"num_streams": "4"}}, "num_streams='4'; allowed"),
        ({"options": {"eps": float("inf")}}, "eps=inf; allowed: a number above 0"),
        ({"options": {"eps": float("nan")}}, "eps=nan; allowed: a number above 0"),
        ({"options": {"speed": 1}}, "no option 'speed'; its options: num_streams"),
        ({"options": None}, "residual.options is None, not a dict"),
        ({"base_model_type": "no_such_family"}, "residual.base_model_type is 'no_such_family'"),
        ({"base_model_type": "vit"}, "residual.base_model_type is 'vit', not a decoder"),
        ({"base_model_type": "resswap"}, "residual.base_model_type is 'resswap'"),
        ({"base_model": 1}, "residual.base_model is 1, not a str"),
        ({"param_dtype": "int8"}, "residual.param_dtype is 'int8'; allowed: float32"),
        ({"param_dtype": "nn"}, "residual.param_dtype is 'nn'; allowed: float32"),
        ({"towers": "encoder"}, "residual.towers is 'encoder'; allowed: decoder, all"),
        ({"towers": ["all"]}, "residual.towers is ['all'], not a str"),
        ({"depth": 3}, "residual.depth is not a field of format version 1"),
    ],
)
def test_a_description_that_does_not_make_sense(folder, residual, message):
    edit_residual(folder, **residual)
    error = refused(folder)
    assert "config.json" in error and message in error


def test_a_description_of_another_family(folder):
    edit_residual(folder, base_model_type="gpt2")
    assert "the weights lack transformer." in refused(folder)


def test_a_field_of_the_family_that_does_not_make_sense(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    error = refused(folder)
    assert "config.json does not describe a llama model" in error and "hidden_size" in error


def test_a_truncated_config(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])
    with pytest.raises(OSError, match=r"config\.json' is not a valid JSON file"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp_connection.base", "model.layers.2.self_attn.q_proj.weight", "lm_head.weight"]
)
def test_a_missing_tensor_is_an_error_not_random_numbers(folder, name):
    edit_weights(folder, **{name: None})
    assert f"{folder}: the weights lack {name}" in refused(folder)


def test_a_missing_tensor_of_the_read_out(tmp_path):
    resswap.convert(tiny("llama"), "attnres").save_pretrained(tmp_path)
    edit_weights(tmp_path, **{"model.stream_readout.query": None})
    assert "the weights lack model.stream_readout.query" in refused(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.3.mlp_connection.base", "model.embed_tokens.scale", "lm_head.bias"])
def test_an_extra_tensor(folder, name):
    edit_weights(folder, **{name: torch.zeros(3)})
    assert f"{folder}: the weights have {name}" in refused(folder)


@pytest.mark.parametrize("arguments", [{}, {"ignore_mismatched_sizes": True}])
def test_a_connection_s_tensor_of_another_shape(folder, arguments):
    edit_weights(folder, **{"model.layers.1.attn_connection.base": torch.zeros(7)})
    error = refused(folder, **arguments)
    assert "model.layers.1.attn_connection.base has the shape (7,) in the weights, and (15,) by config.json" in error


def test_other_options_than_the_weights_were_made_with(folder):
    edit_residual(folder, options={"num_streams": 4})
    assert "model.layers.0.attn_connection.base has the shape (15,) in the weights, and (24,)" in refused(folder)


def test_another_head_may_be_new_but_the_decoder_has_to_be_there(folder):
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    classifier.save_pretrained(folder / "classifier")
    wider = dict(num_labels=5, ignore_mismatched_sizes=True)
    assert AutoModelForSequenceClassification.from_pretrained(folder / "classifier", **wider).score.out_features == 5
    assert "score.weight has the shape" in refused(
        folder / "classifier", AutoModelForSequenceClassification, num_labels=5
    )
    edit_weights(folder, **{"model.layers.0.mlp_connection.fn": None})
    for auto_class, name in ((AutoModelForSequenceClassification, "model.layers"), (AutoModel, "layers")):
        assert f"the weights lack {name}.0.mlp_connection.fn" in refused(folder, auto_class)


def test_parameters_survive_to_the_bit(tmp_path):
    for scheme in SCHEMES:
        model = resswap.convert(tiny("llama"), scheme)
        randomise_connections(model)
        model.save_pretrained(tmp_path)
        loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(loaded.pop(name), parameter), name
        assert not loaded


@pytest.mark.parametrize("size", [4, 1000, -1])
def test_a_truncated_weights_file(folder, size):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:size])
    assert f"{folder / 'model.safetensors'} is damaged or incomplete" in refused(folder)


def test_truncated_shards_and_index(folder):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder / "shards", max_shard_size="200KB")
    shard = sorted((folder / "shards").glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    assert f"{shard} is damaged or incomplete" in refused(folder / "shards")
    shard.write_bytes(content)
    index = folder / "shards" / "model.safetensors.index.json"
    index.write_text(index.read_text()[:100])
    assert f"{index} is damaged or incomplete" in refused(folder / "shards")


class _Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_checkpoint_runs_no_code(folder, tmp_path):
    """Neither its own modules, nor other ones that `auto_map` names, nor pickles."""
    ran = tmp_path / "ran"
    for name in ("modeling_resswap.py", "configuration_resswap.py", "resswap_errors.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w').close()\n")
    assert len(resswap.connections(AutoModelForCausalLM.from_pretrained(folder))) == 6
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = dict.fromkeys(config["auto_map"], "someone/else--module.Class")
    (folder / "config.json").write_text(json.dumps(config))
    assert len(resswap.connections(AutoModelForCausalLM.from_pretrained(folder))) == 6
    (folder / "model.safetensors").unlink()
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump({"lm_head.weight": _Trap(ran)}, file)
    with pytest.raises(Exception, match="weights_only|pickle|Unpickling|Weights"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not ran.exists()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_OPTIONS = sorted({name for scheme in resswap.available_schemes().values() for name in scheme.__dataclass_fields__})
_FIELDS = {
    "format_version": st.just(1) | _JSON,
    "base_model_type": st.sampled_from(["llama", "gpt2", "resswap", "vit", ""]) | _JSON,
    "scheme": st.sampled_from(SCHEMES) | _JSON,
    "options": st.dictionaries(st.sampled_from(_OPTIONS), _JSON, max_size=4) | _JSON,
}
_RESIDUAL = st.fixed_dictionaries(
    {}, optional={**_FIELDS, "base_model": _JSON, "param_dtype": st.sampled_from(["float32", "nn", "int8"]) | _JSON}
)
_OTHER_FIELDS = st.dictionaries(
    st.sampled_from(["hidden_size", "n_embd", "dtype", "rope_parameters", "num_labels", "id2label", "layer_types"]),
    _JSON,
    max_size=3,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.fixed_dictionaries(_FIELDS) | _RESIDUAL | _JSON)
def test_the_reader_raises_nothing_but_its_own_errors(residual):
    try:
        scheme = described_scheme(residual)
    except resswap.ResswapError as error:
        assert "config.json" in str(error) and "residual" in str(error)
    else:
        assert scheme.scheme == residual["scheme"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.fixed_dictionaries(_FIELDS) | _RESIDUAL, _OTHER_FIELDS)
def test_the_config_raises_nothing_but_its_own_errors(residual, fields):
    try:
        config = ResswapConfig.from_dict({"model_type": "resswap", "residual": residual, **fields})
    except resswap.ResswapError as error:
        assert "config.json" in str(error)
    else:
        assert config.model_type == residual["base_model_type"]


def test_the_config_of_a_checkpoint_is_read_without_its_weights(saved):
    assert AutoConfig.from_pretrained(saved).residual["options"]["num_streams"] == 3
