"""Push to and pull from a Hub with huggingface_hub itself, in processes that know only its address and a token."""

import hashlib
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from loopback_hub import TOKEN, LoopbackHub
from processes import command, environ, run_python
from tiny import input_ids, logits, randomise_connections, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import resswap

OWN_CARD = "---\ntags:\n- mine\n---\n# My words\n"


@contextmanager
def hub_with_base():
    with LoopbackHub() as hub:
        hub.create("base/llama", {"README.md": b"---\nlicense: mit\n---\n# A base model\n"})
        yield hub


def client(hub, tmp_path, token=TOKEN):
    """The environment of a machine whose Hub is `hub`; uploads go through LFS, which is what the hub here speaks."""
    home = str(tmp_path / "home")
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1"}


def train(folder, shards="50GB"):
    """A folder as a training recipe leaves it."""
    model = tiny("llama")
    model.config._name_or_path = "base/llama"
    resswap.convert(model, "mhc", num_streams=2)
    randomise_connections(model)
    model.save_pretrained(folder, max_shard_size=shards)
    words = {f"w{i}": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0").save_pretrained(folder)
    (folder / "curves.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (folder / "training_args.bin").write_bytes(b"a pickle")
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "model.safetensors").write_bytes(b"an earlier one")
    torch.save((input_ids(), logits(model, input_ids())), folder.parent / "expected")
    return model


PUSH_AND_PULL = """
    import json, os, sys
    from huggingface_hub import HfApi
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
    import resswap
    folder, expected = sys.argv[1:]
    ids, expected = torch.load(expected)
    api, result = HfApi(), {}

    def same(*args, **kwargs):
        model = AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        with torch.no_grad():
            return torch.equal(model(ids, use_cache=False).logits, expected)

    commit = resswap.push_to_hub(
        folder,
        "run",
        datasets=["me/corpus"],
        command="accelerate launch recipes/train.py --scheme mhc",
        metrics={"eval_loss": 1.25, "perplexity": 3.5, "seconds": float("nan")},
        figures=["curves.png"],
    )
    result["again"] = resswap.push_to_hub(folder, "me/run", metrics={"eval_loss": 1.25}).oid != commit.oid
    resswap.push_to_hub(folder, "me/own")
    result["files"] = sorted(api.list_repo_files("me/run"))
    result["tags"] = api.model_info("me/run").tags
    result["pulled"] = same("me/run")
    generate = pipeline("text-generation", "me/run")
    result["text"] = generate("w5 w6", max_new_tokens=3, do_sample=False)[0]["generated_text"]

    model = AutoModelForCausalLM.from_pretrained("me/run")
    model.push_to_hub("plain")
    model.save_pretrained(folder + "_sharded", max_shard_size="150KB", push_to_hub=True, repo_id="me/sharded")
    result["sharded"] = [same("me/plain"), same("me/sharded")]
    model.push_to_hub("me/plain", max_shard_size="150KB")
    result["shards alone"] = [same("me/plain"), "model.safetensors" in api.list_repo_files("me/plain")]

    with torch.no_grad():
        next(iter(resswap.connections(model).values())).base.add_(1.0)
    model.push_to_hub("me/run", revision="v2")
    revisions = {"main": "main", "v2": "v2", "first": commit.oid}
    result["revisions"] = {name: same("me/run", revision=revision) for name, revision in revisions.items()}
    print("\\n" + json.dumps(result))
"""

WITHOUT = """
    import json, sys
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
    ids, expected = torch.load(sys.argv[1])
    result = {}
    tokenizer = AutoTokenizer.from_pretrained("me/run")
    result["tokens"] = tokenizer("w5 w6")["input_ids"]
    try:
        AutoModelForCausalLM.from_pretrained("me/run")
    except ValueError as error:
        result["refused"] = "trust_remote_code=True" in str(error)
    model = AutoModelForCausalLM.from_pretrained("me/run", trust_remote_code=True)
    with torch.no_grad():
        result["pulled"] = torch.equal(model(ids, use_cache=False).logits, expected)
    model.save_pretrained(sys.argv[2])
    again = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
    with torch.no_grad():
        result["saved again"] = torch.equal(again(ids, use_cache=False).logits, expected)
    generate = pipeline("text-generation", "me/run", trust_remote_code=True)
    result["text"] = generate("w5 w6", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    print("\\n" + json.dumps(result))
"""


def test_push_list_and_pull(tmp_path):
    train(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with hub_with_base() as hub:
        hub.create("me/own", {"README.md": OWN_CARD.encode()})
        environment = client(hub, tmp_path)
        result = run_python(PUSH_AND_PULL, tmp_path / "run", tmp_path / "expected", **environment)
        files = hub.files("me/run", hub.heads["me/run"]["main"])
        first = hub.files("me/run", list(hub.repos["me/run"])[1])
        elsewhere = {**environment, "HF_HOME": str(tmp_path / "elsewhere")}
        arguments = [tmp_path / "expected", tmp_path / "again"]
        clean = run_python(WITHOUT, *arguments, without_resswap=True, **elsewhere)
        assert hub.unknown == []
        assert hub.files("me/own")["README.md"] == OWN_CARD.encode()
        assert "model.safetensors" in hub.files("me/own")

    assert result["again"]  # a repository that exists takes another push: here, of a card with fewer figures
    assert result["pulled"] and result["sharded"] == [True, True] and result["shards alone"] == [True, False]
    assert result["revisions"] == {"main": True, "v2": False, "first": True}
    assert result["text"].startswith("w5 w6") and len(result["text"]) > len("w5 w6w")
    assert {"resswap", "mhc"} <= set(result["tags"])
    assert result["files"] == sorted(files)
    assert {"model.safetensors", "tokenizer.json", "curves.png", "modeling_resswap.py", "README.md"} <= set(files)
    assert not any(name.endswith((".bin", ".pt")) or "checkpoint" in name for name in files)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after[path]} == {tmp_path / "run" / "README.md"}
    assert clean == {
        "tokens": [5, 6],
        "refused": True,
        "pulled": True,
        "saved again": True,
        "text": result["text"],
    }

    card = ModelCard(first["README.md"].decode())
    assert card.data.base_model == "base/llama"
    assert card.data.license == "mit"  # the base model's, as its repository says
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["resswap", "mhc"] and card.data.datasets == ["me/corpus"]
    assert {r.metric_type: r.metric_value for r in card.data.eval_results} == {"eval_loss": 1.25, "perplexity": 3.5}
    for text in (
        "accelerate launch recipes/train.py --scheme mhc",
        "![curves](curves.png)",
        "| `num_streams` | 2 |",
        "import resswap",
        'from_pretrained("me/run", trust_remote_code=True)',
    ):
        assert text in card.text


PUSH = """
    import json, sys
    import resswap
    print("\\n" + json.dumps(resswap.push_to_hub(sys.argv[1], "run").oid))
"""


def test_an_interrupted_upload_goes_on_where_it_was(tmp_path):
    train(tmp_path / "run", shards="150KB")
    shards = {hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / "run").glob("*.safetensors")}
    assert len(shards) > 3
    with hub_with_base() as hub:
        environment = client(hub, tmp_path)
        hub.hold_after = 2
        arguments = [sys.executable, "-c", command(PUSH), str(tmp_path / "run")]
        process = subprocess.Popen(arguments, env=environ(**environment), stderr=subprocess.DEVNULL)
        try:
            while not hub.held.wait(0.1):
                assert process.poll() is None
        finally:
            process.kill()
            process.wait()
        assert len(hub.uploads) == 2 and "config.json" not in hub.files("me/run")
        hub.hold_after = None
        hub.release.set()
        run_python(PUSH, tmp_path / "run", **environment)
        stored = [upload for upload in hub.uploads if upload in shards]
        assert sorted(stored) == sorted(shards)  # each of them once
        for file in (tmp_path / "run").glob("model*"):
            assert hub.files("me/run")[file.name] == file.read_bytes()


REFUSED = """
    import json, os, sys
    from huggingface_hub.errors import HfHubHTTPError
    from transformers import AutoModelForCausalLM
    import resswap
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    errors = []
    for push in (lambda: resswap.push_to_hub(sys.argv[1], "run"), lambda: model.push_to_hub("run")):
        try:
            push()
        except HfHubHTTPError as error:
            errors.append([error.response.status_code, str(error)])
    with torch.no_grad():
        finite = bool(model(torch.tensor([[1, 2]])).logits.isfinite().all())
    print("\\n" + json.dumps([errors, finite, len(resswap.connections(model))]))
"""


def test_a_wrong_token_is_the_client_s_error_and_loses_nothing(tmp_path):
    train(tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with hub_with_base() as hub:
        errors, finite, connections = run_python(REFUSED, tmp_path / "run", **client(hub, tmp_path, token="hf_wrong"))
        assert hub.uploads == [] and list(hub.repos) == ["base/llama"]
    assert [status for status, _ in errors] == [401, 401]
    assert all("Invalid credentials" in message for _, message in errors)
    assert finite and connections == 6
    assert {path: path.read_bytes() for path in before} == before


def test_a_card_that_somebody_wrote_is_kept(tmp_path):
    model = train(tmp_path / "run")
    (tmp_path / "run" / "README.md").write_text(OWN_CARD)
    model.save_pretrained(tmp_path / "run")
    assert (tmp_path / "run" / "README.md").read_text() == OWN_CARD


def test_the_card_of_a_saved_folder(tmp_path):
    model = train(tmp_path / "run")
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert card.data.base_model == "base/llama" and card.data.tags == ["resswap", "mhc"]
    assert "AutoModelForCausalLM.from_pretrained" in card.text
    model.model.save_pretrained(tmp_path / "base")
    assert "AutoModel.from_pretrained" in (tmp_path / "base" / "README.md").read_text()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["residual"]["base_model"] == "base/llama"


@pytest.mark.parametrize("figures", [[], ["missing.png"]])
def test_what_cannot_be_pushed(tmp_path, figures):
    if figures:
        resswap.convert(tiny("llama")).save_pretrained(tmp_path)
    else:
        tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(resswap.CheckpointError, match="no figure missing.png" if figures else "`residual` is None"):
        resswap.push_to_hub(tmp_path, "me/run", figures=figures)


def test_the_recipe_pushes(tmp_path):
    """train.py with --push_to_hub: the model, the figure, and a card with the command and the metrics."""
    recipe = str(Path(__file__).parents[1] / "recipes" / "train.py")
    sizes = "hidden_size=32,intermediate_size=32,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=2"
    options = ["--block_size", "32", "--max_train_steps", "2", "--max_eval_samples", "4", "--output_dir", "run"]
    options += ["--model_type", "llama", "--config_overrides", sizes, "--scheme", "hc"]
    with hub_with_base() as hub:
        environment = environ(**client(hub, tmp_path), ACCELERATE_USE_CPU="true")
        run = [sys.executable, recipe, *options, "--push_to_hub", "--hub_model_id", "trained"]
        result = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        files = hub.files("me/trained")
    assert {"config.json", "model.safetensors", "curves.png", "run.json", "README.md"} <= set(files)
    card = files["README.md"].decode()
    assert "--scheme hc" in card and "perplexity" in card and "curves.png" in card
