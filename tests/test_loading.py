"""What `from_pretrained` offers works for converted models: dtypes, devices, offload, attention, quantised weights."""

import copy

import gguf
import numpy as np
import pytest
import torch
from accelerate import Accelerator, cpu_offload, load_checkpoint_in_model
from accelerate.state import AcceleratorState
from tiny import SCHEMES, input_ids, logits, new_parameters, randomise_connections, tiny
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

import resswap

load = AutoModelForCausalLM.from_pretrained


@pytest.fixture(autouse=True)
def _another_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module", params=["mhc", "attnres"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = resswap.convert(tiny("llama", intermediate_size=128), request.param)
    randomise_connections(model)
    model.save_pretrained(folder)
    return folder, model


def test_one_device(saved):
    for arguments in ({"device_map": "auto"}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}):
        assert torch.equal(logits(load(saved[0], **arguments), input_ids()), logits(saved[1], input_ids()))


def test_device_map_with_offload_to_disk(saved, tmp_path):
    arguments = {"device_map": "auto", "max_memory": {"cpu": 300_000}, "offload_folder": tmp_path / "offload"}
    model = load(saved[0], **arguments)
    assert "disk" in model.hf_device_map.values()
    assert torch.equal(logits(model, input_ids()), logits(saved[1], input_ids()))
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again"), input_ids()), logits(saved[1], input_ids()))


def test_offload_to_disk_of_single_layers(saved, tmp_path):
    names = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0"]
    device_map = dict.fromkeys([*names, "model.stream_expand", "model.stream_readout"], "cpu")
    device_map |= {"model.layers.1": "disk", "model.layers.2": "disk"}
    model = load(saved[0], device_map=device_map, offload_folder=tmp_path)
    assert all(p.is_meta for p in model.model.layers[1].attn_connection.parameters())
    assert torch.equal(logits(model, input_ids()), logits(saved[1], input_ids()))


def test_offload_to_cpu(saved):
    model = load(saved[0])
    cpu_offload(model, execution_device="cpu")
    assert all(p.is_meta for p in new_parameters(model).values())
    assert torch.equal(logits(model, input_ids()), logits(saved[1], input_ids()))


def test_attention_implementations(saved):
    expected = logits(saved[1], input_ids())
    for name in ("eager", "sdpa"):
        model = load(saved[0], attn_implementation=name)
        assert model.config._attn_implementation == name
        torch.testing.assert_close(logits(model, input_ids()), expected, rtol=1e-4, atol=1e-4)


def test_state_dicts(saved, tmp_path):
    fresh = resswap.convert(tiny("llama", intermediate_size=128), saved[1].config.residual["scheme"])
    fresh.load_state_dict(saved[1].state_dict())
    assert torch.equal(logits(fresh, input_ids()), logits(saved[1], input_ids()))
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(saved[1], tmp_path, max_shard_size="200KB")
    other = resswap.convert(tiny("llama", intermediate_size=128), saved[1].config.residual["scheme"])
    load_checkpoint_in_model(other, tmp_path)
    assert torch.equal(logits(other, input_ids()), logits(saved[1], input_ids()))


def test_schemes_side_by_side(tmp_path):
    models = {}
    for scheme in SCHEMES:
        models[scheme] = resswap.convert(tiny("llama"), scheme)
        randomise_connections(models[scheme])
        models[scheme].save_pretrained(tmp_path / scheme)
    loaded = {scheme: load(tmp_path / scheme) for scheme in SCHEMES}
    plain = tiny("llama")
    assert len(resswap.connections(plain)) == 0
    for scheme, model in loaded.items():
        assert torch.equal(logits(model, input_ids()), logits(models[scheme], input_ids()))


def make_trainer(model, folder, **arguments):
    data = [{"input_ids": row, "labels": row} for row in input_ids(16)]
    arguments = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, **arguments}
    return Trainer(model, TrainingArguments(folder, per_device_train_batch_size=4, **arguments), train_dataset=data)


def test_a_trainer_s_checkpoint_carries_the_code(tmp_path):
    model = resswap.convert(tiny("llama"))
    trainer = make_trainer(model, tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        assert (folder / "modeling_resswap.py").is_file() and not list(folder.glob("pytorch_model*"))
        assert torch.equal(logits(load(folder), input_ids()), logits(model.eval(), input_ids()))


@pytest.mark.parametrize(("family", "scheme"), [("llama", "attnres"), ("gpt2", "mhc"), ("mixtral", "mhc")])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_trainer_resumes(family, scheme, loaded, tmp_path):
    """The resumed model is a fresh conversion, or what was loaded from another checkpoint."""
    model = resswap.convert(tiny(family), scheme)
    make_trainer(model, tmp_path, max_steps=4, save_steps=1).train()
    resumed = load(tmp_path / "checkpoint-1") if loaded else resswap.convert(tiny(family), scheme)
    make_trainer(resumed, tmp_path / "resumed", max_steps=4).train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    for name, parameter in resumed.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_param_dtype_the_new_parameters_follow_the_model(scheme, tmp_path):
    model = resswap.convert(tiny("llama", dtype=torch.bfloat16), scheme)
    model.save_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}
    assert {p.dtype for p in model.to(torch.float32).parameters()} == {torch.float32}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_param_dtype_is_kept_whatever_happens_to_the_model(scheme, tmp_path):
    model = resswap.convert(tiny("llama"), scheme, param_dtype=torch.float32)
    randomise_connections(model)  # to values that bfloat16 cannot hold
    expected = {name: p.clone() for name, p in new_parameters(model).items()}

    def check(model, dtype):
        new = new_parameters(model)
        assert new.keys() == expected.keys() and all(torch.equal(p, expected[name]) for name, p in new.items())
        assert {p.dtype for name, p in model.named_parameters() if name not in new} == {dtype}
        assert model(input_ids(), use_cache=False).logits.dtype == dtype

    check(model.to(torch.bfloat16), torch.bfloat16)
    check(copy.deepcopy(model).half(), torch.float16)
    model.save_pretrained(tmp_path)
    check(load(tmp_path), torch.bfloat16)
    check(load(tmp_path, dtype=torch.bfloat16), torch.bfloat16)
    check(load(tmp_path, dtype=torch.float16), torch.float16)
    check(load(tmp_path).to(torch.float32).to(torch.bfloat16), torch.bfloat16)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(load(tmp_path))
    assert all(torch.equal(p, expected[name]) for name, p in new_parameters(prepared).items())


def test_param_dtype_may_be_the_narrower_one(tmp_path):
    resswap.convert(tiny("llama"), param_dtype=torch.bfloat16).save_pretrained(tmp_path)
    for model in (load(tmp_path), load(tmp_path, dtype=torch.float32), load(tmp_path).float()):
        assert {p.dtype for p in new_parameters(model).values()} == {torch.bfloat16}
        assert model.lm_head.weight.dtype == torch.float32


def test_param_dtype_and_new_devices():
    model = resswap.convert(tiny("llama"), "attnres", param_dtype=torch.float32).to(torch.bfloat16)
    assert {p.dtype for p in new_parameters(model.to("meta")).values()} == {torch.float32}
    empty = model.to_empty(device="cpu")
    assert {(p.dtype, p.device.type) for p in new_parameters(empty).values()} == {(torch.float32, "cpu")}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "float32", 3])
def test_param_dtype_that_is_not_allowed(dtype):
    with pytest.raises(resswap.OptionError, match=f"param_dtype={dtype!r}; allowed: torch.float32"):
        resswap.convert(tiny("llama"), param_dtype=dtype)


QUANTISED = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
    "8bit": {"load_in_8bit": True},
}


@pytest.mark.parametrize("bits", QUANTISED)
def test_bitsandbytes(saved, bits, tmp_path):
    """Connections are not quantised; the rest is, when the converted model is loaded or converted after loading."""
    model = load(saved[0], quantization_config=BitsAndBytesConfig(**QUANTISED[bits]))
    assert type(model.model.layers[0].mlp.up_proj).__name__ in ("Linear4bit", "Linear8bitLt")
    for name, parameter in new_parameters(model).items():
        assert torch.equal(parameter, dict(saved[1].named_parameters())[name])
    model.save_pretrained(tmp_path / "again")  # before it runs: bitsandbytes repacks 4-bit weights then, with loss
    expected = logits(model, input_ids())
    both = torch.stack([expected.flatten(), logits(saved[1], input_ids()).flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.6
    assert torch.equal(logits(load(tmp_path / "again"), input_ids()), expected)


@pytest.mark.parametrize("bits", QUANTISED)
def test_converting_a_bitsandbytes_model(bits, tmp_path):
    tiny("llama", intermediate_size=128).save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=BitsAndBytesConfig(**QUANTISED[bits]))
    resswap.convert(model)
    randomise_connections(model)
    model.save_pretrained(tmp_path / "converted")
    expected = logits(model, input_ids())
    again = load(tmp_path / "converted")
    assert type(again.model.layers[0].mlp.up_proj) is type(model.model.layers[0].mlp.up_proj)
    assert torch.equal(logits(again, input_ids()), expected)
    plain = load(tmp_path / "plain", quantization_config=BitsAndBytesConfig(**QUANTISED[bits]))
    before = logits(plain, input_ids())
    torch.testing.assert_close(logits(resswap.convert(plain), input_ids()), before, rtol=2e-2, atol=2e-2)


def write_gguf(path, model):
    """A llama model as llama.cpp stores it, weights in Q8_0."""
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in weights.items():
        values = tensor.numpy().astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), gguf.quants.quantize(values, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converting_a_gguf_model(tmp_path):
    write_gguf(tmp_path / "model.gguf", tiny("llama", intermediate_size=128))
    model = load(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    before = logits(model, input_ids())
    resswap.convert(model, "block_attnres", num_blocks=2)
    torch.testing.assert_close(logits(model, input_ids()), before, rtol=1e-5, atol=1e-5)
    randomise_connections(model)
    model.save_pretrained(tmp_path / "converted")
    assert torch.equal(logits(load(tmp_path / "converted"), input_ids()), logits(model, input_ids()))
