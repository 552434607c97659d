"""Saved models load without resswap, by the code they bring along, and nothing of it runs unasked."""

import ast
import json
import shutil
import sys

import pytest
import torch
from processes import run_python
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, SCHEMES, input_ids, load_by_own_code, logits, new_parameters, randomise_connections, tiny
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig
from transformers.dynamic_module_utils import get_imports
from transformers.models.llama import modeling_llama

import resswap


def converted(family="llama", scheme="mhc", **overrides):
    model = resswap.convert(tiny(family, **overrides), scheme)
    randomise_connections(model)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = converted()
    model.save_pretrained(folder)
    return folder, model


CLEAN_PROCESS = """
    import copy, json, sys
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline
    import transformers
    transformers.logging.set_verbosity_error()
    folder, again, inputs = sys.argv[1:]
    data = torch.load(inputs)
    ids = data["ids"]
    refusals = []
    for arguments in ({}, {"trust_remote_code": False}):
        try:
            AutoModelForCausalLM.from_pretrained(folder, **arguments)
        except ValueError as error:
            refusals.append(str(error))
    load = dict(trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, **load)
    with torch.no_grad():
        outputs = model(ids, use_cache=False, output_hidden_states=True)
        base = AutoModel.from_pretrained(folder, **load)
        hidden = base(ids, use_cache=False).last_hidden_state
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, **load)
    result = {
        "refusals": refusals,
        "logits": torch.equal(outputs.logits, data["logits"]),
        "hidden_states": all(map(torch.equal, outputs.hidden_states, data["hidden_states"])),
        "base": torch.equal(hidden, data["hidden_states"][-1]),
        "generated": model.generate(ids, max_new_tokens=6, do_sample=False).tolist() == data["generated"].tolist(),
        "labels": list(classifier(ids).logits.shape),
        "name": [type(model).__name__, type(model.model.layers[0]).__name__, model.config.model_type],
    }
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **load)
    result["dtypes"] = sorted({str(parameter.dtype) for parameter in half.parameters()})
    offload = dict(device_map="auto", max_memory={"cpu": 300_000}, offload_folder=again + "_offload")
    with torch.no_grad():
        offloaded = AutoModelForCausalLM.from_pretrained(folder, **offload, **load)
        equal = torch.equal(offloaded(ids, use_cache=False).logits, data["logits"])
    result["offload"] = ["disk" in offloaded.hf_device_map.values(), equal]
    copy.deepcopy(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(model(ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(again)
    reloaded = AutoModelForCausalLM.from_pretrained(again, **load)
    with torch.no_grad():
        result["trained"] = bool(losses[-1] < losses[0])
        result["saved again"] = torch.equal(reloaded(ids).logits, model(ids).logits)
    result["resswap"] = [name for name in sys.modules if name.partition(".")[0] == "resswap"]
    print("\\n" + json.dumps(result))
"""


@pytest.mark.parametrize("scheme", ["mhc", "block_attnres"])
def test_in_a_clean_process(scheme, tmp_path):
    model = converted(scheme=scheme)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        outputs = model(input_ids(), use_cache=False, output_hidden_states=True)
    generated = model.generate(input_ids(), max_new_tokens=6, do_sample=False)
    expected = {"logits": outputs.logits, "hidden_states": outputs.hidden_states, "generated": generated}
    torch.save({"ids": input_ids(), **expected}, tmp_path / "inputs")
    arguments = [tmp_path / name for name in ("model", "again", "inputs")]
    result = run_python(CLEAN_PROCESS, *arguments, without_resswap=True, HF_MODULES_CACHE=str(tmp_path / "modules"))
    refusals = result.pop("refusals")
    assert len(refusals) == 2 and all("trust_remote_code=True" in refusal for refusal in refusals)
    assert result == {
        "logits": True,
        "hidden_states": True,
        "base": True,
        "generated": True,
        "labels": [2, 3],
        "dtypes": ["torch.bfloat16"],
        "offload": [True, True],
        "name": ["LlamaForCausalLM", "LlamaDecoderLayer", "llama"],
        "trained": True,
        "saved again": True,
        "resswap": [],
    }
    for file in (tmp_path / "model").glob("*.py"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    with_resswap = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert len(resswap.connections(with_resswap)) == 6 and resswap.diff(with_resswap)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_code_gives_equal_logits_for_every_family(family, tmp_path):
    model = converted(family)
    model.save_pretrained(tmp_path / family)
    own = load_by_own_code(tmp_path / family)
    assert type(own).__module__.startswith("transformers_modules.")
    assert torch.equal(logits(own, input_ids()), logits(model, input_ids()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_own_code_gives_equal_logits_and_gradients_for_every_scheme(scheme, tmp_path):
    model = converted(scheme=scheme)
    model.save_pretrained(tmp_path / scheme)
    own = load_by_own_code(tmp_path / scheme)
    for each in (model, own):
        each(input_ids(), labels=input_ids(), use_cache=False).loss.backward()
    expected = dict(model.named_parameters())
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name


def test_own_code_keeps_param_dtype(tmp_path):
    model = resswap.convert(tiny("llama"), "attnres", param_dtype=torch.float32).to(torch.bfloat16)
    randomise_connections(model)
    model.save_pretrained(tmp_path / "model")
    own = load_by_own_code(tmp_path / "model")
    own.to(torch.float16)
    for name, parameter in new_parameters(model).items():
        kept = own.get_parameter(name)
        assert kept.dtype == torch.float32 and torch.equal(kept, parameter), name
    assert own.lm_head.weight.dtype == torch.float16


def test_own_code_checks_the_weights_too(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp_connection.base"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"the weights lack model\.layers\.0\.mlp_connection\.base"):
        load_by_own_code(folder)
    config = json.loads((folder / "config.json").read_text())
    config["residual"]["options"]["num_streams"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: residual: mhc: num_streams=0; allowed"):
        load_by_own_code(folder)


def test_layers_of_one_class_that_were_rewritten_differently(tmp_path):
    """Conditions are decided for each layer, so one class may be rewritten in several ways; here by a comment."""
    model = converted("mixtral")
    layer = model.model.layers[1]
    [(name, text)] = resswap.surgery.rewritten_methods(type(layer))
    original = resswap.surgery.original_class(type(layer))
    decorator = resswap.surgery.rewritten_decorator(type(layer))
    methods = ((name, f"{text.rstrip()}  # another\n"),)
    layer.__class__ = resswap.surgery.rewritten_class(original, methods, decorator)
    code = resswap.bundle.bundle(model, resswap.configuration.described_scheme(model.config.residual))
    written = code.files["modeling_resswap.py"]
    assert "class MixtralDecoderLayer_2(modeling_mixtral.MixtralDecoderLayer):" in written
    model.config._residual_code = code
    model.save_pretrained(tmp_path / "model")
    own = load_by_own_code(tmp_path / "model")
    assert [type(layer).__name__ for layer in own.model.layers] == ["MixtralDecoderLayer"] * 3
    torch.testing.assert_close(logits(own, input_ids()), logits(model, input_ids()), rtol=1e-5, atol=1e-5)


def test_the_files_can_be_read(saved):
    folder, _ = saved
    origin = open(modeling_llama.__file__, encoding="utf-8").read()
    written = (folder / "modeling_resswap.py").read_text()
    notice = origin[: origin.index("\nfrom ")].rstrip()
    assert "Licensed under the Apache License" in notice and written.startswith(notice)
    assert f"resswap {resswap.__version__}" in written and "transformers 5." in written
    layer = written[written.index("class LlamaDecoderLayer(modeling_llama.LlamaDecoderLayer)") :]
    for line in ("# Self Attention", "# Fully Connected", "hidden_states = residual(hidden_states)"):
        assert line in layer
    assert "self.stream_readout(hidden_states)" in written
    for file in folder.glob("*.py"):
        assert max(map(len, file.read_text().splitlines())) < 121, file
    rewritten = [line for line in layer.splitlines() if "connection" in line]
    assert len(rewritten) == 2


def test_the_files_import_nothing_but_torch_and_transformers(tmp_path):
    """And numpy, which transformers cannot do without."""
    for scheme in SCHEMES:
        converted(scheme=scheme).config.save_pretrained(tmp_path)
    files = list(tmp_path.glob("*.py"))
    assert len(files) > 10
    for file in files:
        assert set(get_imports(file)) <= sys.stdlib_module_names | {"torch", "transformers", "numpy"}, file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and (tmp_path / f"{node.module}.py").exists(), (file, node.module)


def test_only_the_scheme_s_own_files_are_carried(saved):
    names = {file.name for file in saved[0].glob("*.py")}
    assert "resswap_schemes_mhc.py" in names
    assert not any("attnres" in name or "sources" in name or name.endswith("_hc.py") for name in names)


def test_equal_models_have_equal_code(saved, tmp_path):
    converted(hidden_size=32, head_dim=16).save_pretrained(tmp_path / "narrow")
    saved[1].model.save_pretrained(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(saved[0]).save_pretrained(tmp_path / "again")
    names = sorted(file.name for file in saved[0].glob("*.py"))
    for other in ("narrow", "base", "again"):
        assert sorted(file.name for file in (tmp_path / other).glob("*.py")) == names
        for name in names:
            assert (tmp_path / other / name).read_bytes() == (saved[0] / name).read_bytes(), (other, name)


def test_another_forward_in_transformers_is_an_error_that_names_it(saved, monkeypatch):
    with_changes = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", with_changes)
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer\.forward is not that.*pip|Install transformers==5\."):
        load_by_own_code(saved[0])


def test_comments_annotations_and_layout_are_no_other_forward(tmp_path, monkeypatch):
    digest = resswap.installation.digest
    (tmp_path / "written_two_ways.py").write_text(
        "class A:\n    def forward(self, x: int, scale=1.0) -> int:\n        '''What it does.'''\n"
        "        y: int = (x * scale)  # a comment\n        return y + len('a')\n\n\n"
        "class B:\n    def forward(self, x, scale=1.0):\n        y: float = x * scale\n"
        '        return y + len(\n            "a"\n        )\n\n\n'
        "class C:\n    def forward(self, x, scale=1.0):\n        y = x + scale\n        return y + len('a')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import written_two_ways as two

    assert digest(two.A.forward) == digest(two.B.forward) != digest(two.C.forward)


def test_what_is_installed_wins_over_the_code_in_the_folder(saved, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(saved[0], folder)
    for file in folder.glob("*.py"):
        file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit\n")
    for arguments in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        for auto_class in (AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification):
            assert len(resswap.connections(auto_class.from_pretrained(folder, **arguments))) == 6
    assert not (tmp_path / "ran").exists()


def test_a_reverted_model_is_saved_without_code(tmp_path):
    model = resswap.revert(resswap.convert(tiny()))
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"auto_map", "residual", "transformers_weights"} & set(config)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path).config) is LlamaConfig
