"""Converted models are saved, loaded, copied and pickled like any other; nothing loads as a plain model."""

import copy
import json
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import SCHEMES, input_ids, logits, new_parameters, randomise_connections, tiny
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

import resswap


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model of the scheme mhc, and its logits."""
    folder = tmp_path_factory.mktemp("saved")
    model = resswap.convert(tiny("llama"), num_streams=3)
    randomise_connections(model)
    model.save_pretrained(folder)
    return folder, logits(model, input_ids())


def edited(folder, tmp_path, **residual):
    copied = tmp_path / "edited"
    shutil.copytree(folder, copied)
    config = json.loads((copied / "config.json").read_text())
    config["residual"].update(residual)
    (copied / "config.json").write_text(json.dumps(config))
    return copied


FRESH_PROCESS = """
import sys, torch, resswap
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.load(sys.argv[2])
torch.save(model(ids).logits.detach(), sys.argv[3])
"""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loads_in_a_fresh_process(family, scheme, tmp_path):
    model = resswap.convert(tiny(family), scheme)
    randomise_connections(model)
    model.save_pretrained(tmp_path / "model")
    torch.save(input_ids(), tmp_path / "ids")
    arguments = [str(tmp_path / name) for name in ("model", "ids", "logits")]
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, *arguments], check=True, capture_output=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits"), logits(model, input_ids()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loader", ["AutoModelForCausalLM", "AutoModel", "LlamaForCausalLM", "LlamaModel"])
def test_without_resswap_loading_fails(saved, loader):
    code = f"from transformers import {loader} as Loader; Loader.from_pretrained({str(saved[0])!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    assert "resswap" in result.stderr.splitlines()[-1] + result.stderr
    assert "Error" in result.stderr


def test_the_family_s_own_class_does_not_load_it_as_a_plain_model(saved):
    for cls in (LlamaForCausalLM, LlamaModel):
        with pytest.raises(Exception, match="needs resswap"):
            cls.from_pretrained(saved[0])


def test_in_memory_the_model_type_is_the_family_s(saved):
    model = AutoModelForCausalLM.from_pretrained(saved[0])
    assert type(model) is LlamaForCausalLM
    assert isinstance(model.config, LlamaConfig)
    assert model.config.model_type == model.config.to_dict()["model_type"] == "llama"
    assert model.config.dtype == torch.float32
    assert model.config.residual == {
        "format_version": 1,
        "base_model_type": "llama",
        "scheme": "mhc",
        "options": dict(num_streams=3, sinkhorn_iters=20, comb_diagonal=0.9, pre_peak=0.7, scale_init=0.01, eps=1e-6),
    }
    on_disk = json.loads((saved[0] / "config.json").read_text())
    assert on_disk["model_type"] == "resswap" and on_disk["architectures"] == ["LlamaForCausalLM"]


def test_a_loaded_model_is_the_saved_one_and_saves_to_equal_files(saved, tmp_path):
    folder, expected = saved
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(model, input_ids()), expected)
    model.save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_sharded_files(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved[0])
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), input_ids()), saved[1])


def test_dtype_argument(saved):
    model = AutoModelForCausalLM.from_pretrained(saved[0], dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.dtype == torch.bfloat16


def test_other_heads_and_the_base_model(saved):
    base = AutoModel.from_pretrained(saved[0])
    assert isinstance(base, LlamaModel) and len(resswap.connections(base)) == 6
    full = AutoModelForCausalLM.from_pretrained(saved[0])
    with torch.no_grad():
        assert torch.equal(base(input_ids()).last_hidden_state, full.model(input_ids()).last_hidden_state)
    classifier = AutoModelForSequenceClassification.from_pretrained(saved[0], num_labels=3)
    assert len(resswap.connections(classifier)) == 6
    assert torch.equal(classifier.model.layers[2].mlp_connection.fn, full.model.layers[2].mlp_connection.fn)


def test_from_config_builds_a_converted_model(saved):
    config = AutoConfig.from_pretrained(saved[0])
    assert len(resswap.connections(AutoModelForCausalLM.from_config(config))) == 6


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(scheme, duplicate):
    model = resswap.convert(tiny("llama"), scheme)
    randomise_connections(model)
    other = duplicate(model)
    assert torch.equal(logits(other, input_ids()), logits(model, input_ids()))
    assert other.config.residual == model.config.residual
    next(iter(new_parameters(other).values())).data.zero_()
    assert not torch.equal(logits(other, input_ids()), logits(model, input_ids()))


def test_pickle_in_a_fresh_process(tmp_path):
    model = resswap.convert(tiny("llama"))
    torch.save(model, tmp_path / "model.pt")
    code = "import sys, torch; model = torch.load(sys.argv[1], weights_only=False); print(len(model.model.layers))"
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert result.stdout.strip() == "3", result.stderr


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        ({"scheme": "nonsense"}, "residual: There is no scheme 'nonsense'; available: "),
        ({"scheme": 3}, "residual.scheme is 3, not a str"),
        ({"format_version": 99}, "residual.format_version is 99, newer"),
        ({"options": {"num_streams": 0}}, "num_streams=0; allowed: a whole number from 2"),
        ({"options": {"num_streams": "4"}}, "num_streams='4'; allowed"),
        ({"options": {"speed": 1}}, "no option 'speed'; its options: num_streams"),
        ({"options": None}, "residual.options is None, not a dict"),
        ({"base_model_type": "no_such_family"}, "residual.base_model_type is 'no_such_family'"),
    ],
)
def test_a_description_that_does_not_make_sense(saved, tmp_path, residual, message):
    with pytest.raises(resswap.CheckpointError, match=message.replace(".", r"\.")):
        AutoModelForCausalLM.from_pretrained(edited(saved[0], tmp_path, **residual))


def test_missing_parameters_are_an_error_not_random_numbers(saved, tmp_path):
    folder = edited(saved[0], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp_connection.base"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(resswap.CheckpointError, match=r"lack model\.layers\.1\.mlp_connection\.base"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_missing_readout_parameter_is_an_error(tmp_path):
    resswap.convert(tiny("llama"), "attnres").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.stream_readout.query"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(resswap.CheckpointError, match=r"lack model\.stream_readout\.query"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_other_options_than_the_weights_were_made_with(saved, tmp_path):
    options = {"num_streams": 4}
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(edited(saved[0], tmp_path, options=options))
