"""LoRA on converted models: the connections are trained, saved, loaded onto the plain base model, and merged."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import EXACT, SOURCES, TRAINABLE, input_ids, logits, tiny
from transformers import AutoModelForCausalLM

import resswap


def adapted(model, **options):
    return get_peft_model(model, resswap.lora_config(model, r=4, **options))


def train(model, steps=3):
    ids = input_ids(4)
    optimizer = torch.optim.AdamW(resswap.param_groups(model, lr=1e-2))
    model.train()
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def connection_names(model):
    return {name.rpartition(".")[0].split(".modules_to_save")[0] for name in resswap.added_parameters(model)}


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", EXACT)
def test_trained_saved_and_loaded_onto_the_plain_base_model(scheme, model_type, tmp_path):
    base = tiny(model_type)
    model = adapted(resswap.convert(copy.deepcopy(base), scheme))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert torch.allclose(logits(model, input_ids()), logits(base, input_ids()), atol=1e-4)
    train(model)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    copies = {name for name in resswap.added_parameters(model) if ".modules_to_save.default." in name}
    assert {name for name in changed if "lora_" not in name} == copies != set()
    model.save_pretrained(tmp_path)
    loaded = resswap.load_adapter(copy.deepcopy(base), tmp_path)
    assert torch.equal(logits(loaded, input_ids()), logits(model, input_ids()))
    assert not any(p.requires_grad for p in loaded.parameters())
    again = resswap.load_adapter(resswap.convert(copy.deepcopy(base), scheme), tmp_path, is_trainable=True)
    assert torch.equal(logits(again.eval(), input_ids()), logits(model, input_ids()))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("scheme", ["mhc", "attnres"])
def test_merged_model_is_a_converted_model(scheme, tmp_path):
    model = train(adapted(resswap.convert(tiny(), scheme)))
    expected = logits(model, input_ids())
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged, input_ids()), expected, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, input_ids()), logits(merged, input_ids()))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("scheme", TRAINABLE)
def test_checkpointing_gives_the_same_gradients_or_refuses(scheme, reentrant):
    ids = input_ids()
    model = resswap.convert(tiny(), scheme)
    plain = adapted(copy.deepcopy(model)).train()
    torch.manual_seed(1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    checkpointed = adapted(model).train()
    checkpointed.load_state_dict(plain.state_dict())
    if reentrant and scheme in SOURCES:
        with pytest.raises(resswap.UnsupportedModelError, match="use_reentrant"):
            checkpointed(input_ids=ids, labels=ids)
        return
    for each in (plain, checkpointed):
        each(input_ids=ids, labels=ids).loss.backward()
    pairs = [(p.grad, q.grad) for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True)]
    assert sum(p is not None for p, _ in pairs) > 40
    for expected, got in pairs:
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_bfloat16(tmp_path):
    base = tiny(dtype=torch.bfloat16)
    model = train(adapted(resswap.convert(copy.deepcopy(base), "mhc")))
    model.save_pretrained(tmp_path)
    loaded = resswap.load_adapter(base, tmp_path)
    assert torch.equal(logits(loaded, input_ids()), logits(model, input_ids()))


def test_a_fresh_process_loads_it_in_one_call(tmp_path):
    base = tiny()
    base.save_pretrained(tmp_path / "base")
    model = train(adapted(resswap.convert(base, "block_attnres", num_blocks=2)))
    model.save_pretrained(tmp_path / "adapter")
    torch.save(logits(model, input_ids()), tmp_path / "logits.pt")
    script = """
import torch, resswap, sys
from transformers import AutoModelForCausalLM
assert "peft" not in sys.modules
model = AutoModelForCausalLM.from_pretrained("base")
model = resswap.load_adapter(model, "adapter").eval()
ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))
torch.set_num_threads(1)
with torch.no_grad():
    print(torch.equal(model(ids, use_cache=False).logits, torch.load("logits.pt")))
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, text=True, capture_output=True)
    assert result.stdout.strip() == "True", result.stderr


def test_peft_alone_fails_instead_of_leaving_the_connections_out(tmp_path):
    adapted(resswap.convert(tiny(), "mhc")).save_pretrained(tmp_path)
    for load in (lambda: PeftModel.from_pretrained(tiny(), tmp_path), lambda: tiny().load_adapter(str(tmp_path))):
        with pytest.raises(KeyError, match="resswap.load_adapter"):
            load()


def test_options_reach_the_config():
    model = resswap.convert(tiny(), "attnres")
    config = resswap.lora_config(model, r=8, lora_alpha=3, target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert isinstance(config, LoraConfig)
    assert (config.r, config.lora_alpha, config.target_modules) == (8, 3, {"q_proj"})
    assert config.modules_to_save == ["attn_connection", "lm_head", "mlp_connection", "stream_readout"]
    tuned = get_peft_model(model, config)
    lora = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in tuned.named_parameters() if ".lora_" in name}
    assert lora == {"q_proj"}


def test_no_linear_layer_inside_a_connection_gets_an_adapter():
    model = resswap.convert(tiny(), "mhc")
    next(iter(resswap.connections(model).values())).inner = torch.nn.Linear(4, 4)
    tuned = adapted(model)
    assert not any("connection" in name and "lora_" in name for name, _ in tuned.named_parameters())
    assert any("inner.weight" in name and "modules_to_save" in name for name, _ in tuned.named_parameters())


def test_refusals(tmp_path):
    with pytest.raises(resswap.UnsupportedModelError, match="not converted"):
        resswap.lora_config(tiny())
    with pytest.raises(resswap.CheckpointError, match="no adapter with connections"):
        resswap.load_adapter(tiny(), tmp_path)
    get_peft_model(tiny(), LoraConfig(target_modules="all-linear")).save_pretrained(tmp_path / "plain")
    with pytest.raises(resswap.CheckpointError, match="holds no connections"):
        resswap.load_adapter(tiny(), tmp_path / "plain")
    tuned = adapted(resswap.convert(tiny(), "mhc"))
    tuned.save_pretrained(tmp_path / "mhc")
    with pytest.raises(resswap.CheckpointError, match="trained with scheme=mhc, .*converted to scheme=hc, "):
        resswap.load_adapter(resswap.convert(tiny(), "hc"), tmp_path / "mhc")
    with pytest.raises(resswap.CheckpointError, match="does not fit"):
        resswap.load_adapter(tiny(num_hidden_layers=4), tmp_path / "mhc")
    with pytest.raises(resswap.UnsupportedModelError, match="get_peft_model has frozen"):
        resswap.freeze_base(tuned)
    with pytest.raises(resswap.UnsupportedModelError, match="merge"):
        resswap.save_connections(tuned, tmp_path)
    assert json.loads((tmp_path / "mhc/adapter_config.json").read_text())["residual"]["scheme"] == "mhc"
