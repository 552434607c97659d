"""Model types of different patterns: the other schemes, full-graph compile, and what models return besides logits."""

import pytest
import torch
from test_all_types import build, cache_error, gradients, greedy, hidden_states, logits, look
from tiny import EXACT, input_ids, load_by_own_code, randomise_connections, tiny
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, LlamaConfig

import resswap

# Post-norm in submodules, post-norm in the layer, reshapes, a scaled and normalised stream, a learned scale, adds in
# helpers, several at once, a float32 stream, a bias with the add, a changing loop, and a sum of three terms.
PATTERNS = [
    "bert",
    "bart",
    "opt",
    "minimax",
    "doge",
    "bloom",
    "falcon",
    "mamba",
    "gpt_neox_japanese",
    "gemma4_text",
    "gptj",
]


@pytest.mark.parametrize("scheme", ["hc", "block_attnres", "delta_attnres", "denseformer"])
@pytest.mark.parametrize("model_type", PATTERNS)
def test_other_schemes(model_type, scheme):
    model, inputs = build(model_type)
    before, hidden, steps = (look(model, inputs, at) for at in (logits, hidden_states, greedy))
    error = cache_error(model, inputs)
    resswap.convert(model, scheme)
    assert (look(model, inputs, logits) - before).abs().max() <= 1e-5 * before.abs().max()
    assert torch.equal(greedy(model, inputs).argmax(-1), steps.argmax(-1))
    assert [h.shape for h in look(model, inputs, hidden_states)] == [h.shape for h in hidden]
    randomise_connections(model, std=0.1)
    assert cache_error(model, inputs) <= 10 * error + 1e-4
    for name, gradient in gradients(model, inputs).items():
        assert gradient.isfinite().all(), name


@pytest.mark.parametrize("model_type", PATTERNS)
def test_a_saved_model_computes_the_same(model_type, tmp_path):
    model, inputs = build(model_type)
    resswap.convert(model)
    randomise_connections(model, std=0.1)
    model.save_pretrained(tmp_path)
    expected = look(model, inputs, logits)
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path).eval(), load_by_own_code(tmp_path)):
        torch.testing.assert_close(look(loaded, inputs, logits), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "model_type", ["bert", "bart", "opt", "gptj", "bloom", "gemma2", "granite", "phi", "gpt_neox_japanese", "cohere"]
)
def test_one_graph(model_type):
    torch.compiler.reset()
    model, inputs = build(model_type)
    resswap.convert(model)
    randomise_connections(model, std=0.1)
    with torch.no_grad():
        expected = logits(model, inputs)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(logits(compiled, inputs), expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


def test_attentions_and_losses():
    model, ids = tiny("llama", attn_implementation="eager"), input_ids()
    with torch.no_grad():
        before = model(ids, labels=ids, output_attentions=True)
        after = resswap.convert(model)(ids, labels=ids, output_attentions=True)
    torch.testing.assert_close(after.loss, before.loss)
    torch.testing.assert_close(after.attentions, before.attentions, rtol=1e-4, atol=1e-5)


def test_router_logits_of_experts():
    model, ids = tiny("mixtral"), input_ids()
    with torch.no_grad():
        before = model(ids, labels=ids, output_router_logits=True)
        after = resswap.convert(model)(ids, labels=ids, output_router_logits=True)
    torch.testing.assert_close(after.router_logits, before.router_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.aux_loss, before.aux_loss)
    torch.testing.assert_close(after.loss, before.loss)


@pytest.mark.parametrize("scheme", EXACT)
def test_layer_drop(scheme):
    """Layers are skipped at random in training; the same ones for the same seed, before conversion and after."""
    model, inputs = build("blenderbot")
    decoder = model.get_decoder()
    decoder.layerdrop = 0.5
    model.train()

    def with_seed(seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            return logits(model, inputs)

    before = [with_seed(seed) for seed in range(4)]
    assert any((a - before[0]).abs().max() > 0.1 for a in before)
    resswap.convert(model, scheme)
    for seed, expected in enumerate(before):
        torch.testing.assert_close(with_seed(seed), expected, rtol=1e-4, atol=1e-4)


def test_layers_that_share_weights():
    model, inputs = build("zamba")
    resswap.convert(model)
    randomise_connections(model)
    values = [p.data_ptr() for c in resswap.connections(model).values() for p in c.parameters()]
    assert len(values) == len(set(values))
    assert gradients(model, inputs)


def test_the_language_model_of_a_composite_converts_alone():
    model, inputs = build("gemma3")
    before = logits(model, inputs)
    names = list(resswap.connections(resswap.convert(model)))
    assert names and all("language_model" in name for name in names)
    torch.testing.assert_close(logits(model, inputs), before, rtol=1e-4, atol=1e-4)


def test_a_head_that_is_no_language_model():
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model, ids = AutoModelForTokenClassification.from_config(config).eval(), input_ids()
    with torch.no_grad():
        before = model(ids).logits
        torch.testing.assert_close(resswap.convert(model)(ids).logits, before, rtol=1e-4, atol=1e-4)
