"""Converted models are saved, loaded, copied and pickled like any other; nothing loads as a plain model."""

import copy
import json
import pickle

import pytest
import torch
from processes import run_python
from tiny import SCHEMES, TRAINABLE, input_ids, load_by_own_code, logits, new_parameters, randomise_connections, tiny
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


FRESH_PROCESS = """
    import json, sys, resswap
    from transformers import AutoModelForCausalLM
    equal = {}
    for folder in sys.argv[1:]:
        ids, expected = torch.load(folder + "/expected")
        with torch.no_grad():
            outputs = AutoModelForCausalLM.from_pretrained(folder)(ids, use_cache=False)
        equal[folder] = torch.equal(outputs.logits, expected)
    print(json.dumps(equal))
"""


def test_loads_in_a_fresh_process(tmp_path):
    """All schemes and two families side by side in one process."""
    folders = []
    for family in ("llama", "gpt2"):
        for scheme in SCHEMES:
            model = resswap.convert(tiny(family), scheme)
            randomise_connections(model)
            folders.append(tmp_path / f"{family}_{scheme}")
            model.save_pretrained(folders[-1])
            torch.save((input_ids(), logits(model, input_ids())), folders[-1] / "expected")
    equal = run_python(FRESH_PROCESS, *folders)
    assert len(equal) == 2 * len(SCHEMES) and all(equal.values()), equal


WITHOUT = """
    import json, sys, transformers
    messages = {}
    for name in ("AutoModelForCausalLM", "AutoModel", "LlamaForCausalLM", "LlamaModel"):
        try:
            getattr(transformers, name).from_pretrained(sys.argv[1], trust_remote_code=False)
        except Exception as error:
            messages[name] = str(error)
    print("\\n" + json.dumps(messages))
"""


def test_without_resswap_nothing_loads_it_as_a_plain_model(saved):
    messages = run_python(WITHOUT, saved[0], without_resswap=True)
    assert "trust_remote_code=True" in messages["AutoModelForCausalLM"]
    assert "trust_remote_code=True" in messages["AutoModel"]
    assert "needs resswap" in messages["LlamaForCausalLM"]
    assert "needs resswap" in messages["LlamaModel"]


def test_the_family_s_own_class_does_not_load_it_as_a_plain_model(saved):
    for cls in (LlamaForCausalLM, LlamaModel):
        with pytest.raises(Exception, match="needs resswap"):
            cls.from_pretrained(saved[0])


def test_in_memory_the_model_type_is_the_family_s(saved):
    model = AutoModelForCausalLM.from_pretrained(saved[0])
    assert isinstance(model, LlamaForCausalLM) and type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(model.config, LlamaConfig)
    assert model.config.model_type == model.config.to_dict()["model_type"] == "llama"
    assert model.config.dtype == torch.float32
    assert model.config.residual == {
        "format_version": 1,
        "base_model_type": "llama",
        "scheme": "mhc",
        "options": {
            **dict(num_streams=3, sinkhorn_iters=20, comb_diagonal=0.9, pre_peak=0.7, scale_init=0.01, eps=1e-6),
            **dict(pre_pattern="connections", learned_readout=False, expansion_scale=False, recompute=True),
        },
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


@pytest.mark.parametrize("scheme", TRAINABLE)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(scheme, duplicate):
    model = resswap.convert(tiny("llama"), scheme)
    randomise_connections(model)
    other = duplicate(model)
    assert torch.equal(logits(other, input_ids()), logits(model, input_ids()))
    assert other.config.residual == model.config.residual
    next(iter(new_parameters(other).values())).data.zero_()
    assert not torch.equal(logits(other, input_ids()), logits(model, input_ids()))


UNPICKLED = """
    import json, sys
    model, ids, expected = torch.load(sys.argv[1], weights_only=False)
    model.save_pretrained(sys.argv[2])
    base = model.model
    with torch.no_grad():
        print(json.dumps([torch.equal(model(ids, use_cache=False).logits, expected), type(base).__name__]))
"""


def test_pickle_in_a_fresh_process(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved[0])
    torch.save((model, input_ids(), saved[1]), tmp_path / "model.pt")
    assert run_python(UNPICKLED, tmp_path / "model.pt", tmp_path / "model") == [True, "LlamaModel"]
    for file in saved[0].iterdir():
        if file.name != "README.md":
            assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_scheme_defined_elsewhere_is_carried_too(tmp_path, monkeypatch):
    (tmp_path / "lab_scheme.py").write_text(
        '"""A scheme of one\'s own."""\n\nfrom dataclasses import dataclass\nfrom functools import partial\n\n'
        "import torch\nfrom torch import nn\n\n"
        "from resswap.schemes import Add, Connection, SchemeConfig, option, register_scheme\n\n\n"
        '@register_scheme\n@dataclass(frozen=True)\nclass GatedConfig(SchemeConfig):\n    scheme = "lab_gated"\n\n'
        '    start: float = option(1.0, "The gate.", "a number")\n\n'
        "    def connection(self, place):\n        return Gated(place.index, self.start)\n\n"
        "\n"
        "class Gated(Connection):\n    def __init__(self, index, start):\n        super().__init__(index)\n"
        "        self.gate = nn.Parameter(torch.tensor([start]))\n\n"
        "    def forward(self, streams):\n        return streams, Add(streams, partial(_add, self.gate))\n\n\n"
        "def _add(gate, streams, y):\n    return streams + gate * y\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import lab_scheme  # noqa: F401

    try:
        model = resswap.convert(tiny("llama"), "lab_gated")
        randomise_connections(model)
        model.save_pretrained(tmp_path / "model")
        assert "from .resswap_schemes_base import" in (tmp_path / "model" / "lab_scheme.py").read_text()
        own = load_by_own_code(tmp_path / "model")
        module = type(own.model.layers[0].attn_connection).__module__
        assert module.startswith("transformers_modules.") and module.endswith(".lab_scheme")
        assert torch.equal(logits(own, input_ids()), logits(model, input_ids()))
    finally:
        resswap.schemes.base._SCHEMES.pop("lab_gated")
