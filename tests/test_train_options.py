"""train.py: streams, workers, schedules, precision, trackers, the report, and what is said of mistakes."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

import resswap

OPTIONS = (
    "--model_type llama --config_overrides "
    "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,"
    "max_position_embeddings=64 --block_size 32 --max_eval_samples 5 --learning_rate 1e-2 --max_train_steps 6 "
    "--logging_steps 1 --eval_steps 3 --per_device_train_batch_size 2"
).split()


@pytest.fixture(scope="module")
def texts(recipes):
    path = recipes.folder / "texts.jsonl"
    documents = ["".join(chr(97 + (i * i + j) % 26) for i in range(70 + j)) for j in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return ["--train_file", str(path)]


@pytest.fixture(scope="module")
def train(recipes, texts):
    def run(name, *options, **job):
        recipes.run(*OPTIONS, *texts, *options, "--output_dir", name, **job)
        return json.loads((recipes.folder / name / "run.json").read_text())

    return run


def losses(record):
    return [point["train_loss"] for point in record["history"]]


STREAM = ["--streaming", "--shuffle_buffer_size", "16"]


def test_a_stream_has_a_fixed_order_whoever_reads_it(train):
    one = train("stream", *STREAM, "--per_device_train_batch_size", 4)
    assert one["data"] == {"train_blocks": None, "eval_blocks": 5, "block_size": 32}
    two = train("stream-two", *STREAM, processes=2)
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    other = train("stream-seed", *STREAM, "--per_device_train_batch_size", 4, "--shuffle_buffer_size", 1)
    assert losses(other) != pytest.approx(losses(one), abs=1e-4)


def test_workers_change_nothing(train):
    one = train("workers-none")
    two = train("workers-two", "--dataloader_num_workers", 2, "--preprocessing_num_workers", 1)
    assert losses(two) == losses(one)
    assert one["data"]["train_blocks"] > 50


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["linear", "--num_warmup_steps", 2], [0, 5e-3, 1e-2, 7.5e-3, 5e-3, 2.5e-3]),
        (["cosine"], [5e-3 * (1 + torch.tensor(torch.pi * k / 6).cos().item()) for k in range(6)]),
        (["warmup_stable_decay", "--num_warmup_steps", 2, "--num_decay_steps", 2], [0, 5e-3, 1e-2, 1e-2, 1e-2, 5e-3]),
    ],
    ids=["linear", "cosine", "wsd"],
)
def test_schedules(train, options, expected):
    record = train(f"schedule-{options[0]}", "--lr_scheduler_type", *options)
    assert [point["lr"] for point in record["history"]] == pytest.approx(expected, abs=1e-8)


def test_fp16(train):
    record = train("fp16", "--scheme", "mhc", "--mixed_precision", "fp16")
    assert record["mixed_precision"] == "fp16"
    assert record["evaluations"][-1]["eval_loss"] < record["evaluations"][0]["eval_loss"] - 0.1


def test_bf16_clipping_and_the_trackers(train, recipes):
    options = ["--mixed_precision", "bf16", "--max_grad_norm", "0.05", "--report_to", "tensorboard"]
    record = train("board", "--scheme", "attnres", *options)
    assert record["mixed_precision"] == "bf16"
    assert all(point["grad_norm"] > 0.05 for point in record["history"])  # before clipping
    board = EventAccumulator(str(next((recipes.folder / "board").rglob("events*")).parent))
    board.Reload()
    logged = {tag: [event.value for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert logged["train/train_loss"] == pytest.approx(losses(record), rel=1e-5)
    assert logged["eval/loss"] == pytest.approx([point["eval_loss"] for point in record["evaluations"]], rel=1e-5)
    assert all(value > 0 for value in logged["train/tokens_per_second"])
    assert "residual/read_entropy" in logged


def test_the_report(train, recipes):
    record = train("report", "--scheme", "mhc", "--lora_r", 4)
    folder = recipes.folder / "report"
    assert {"README.md", "run.json", "curves.png", "adapter_model.safetensors"} <= {p.name for p in folder.iterdir()}
    card = (folder / "README.md").read_text()
    assert f"{record['final']['eval_loss']:.4f}" in card and f"{record['final']['trained_parameters']:,}" in card
    assert "resswap.load_adapter" in card
    plain = train("report-plain", "--max_train_steps", 1)
    assert (
        'AutoModelForCausalLM.from_pretrained("report-plain")'
        in (recipes.folder / "report-plain" / "README.md").read_text()
    )
    assert plain["final"]["connection_parameters"] == 0


def test_only_connections_leave_a_small_file(train, recipes):
    train("base", "--max_train_steps", 1)
    base = recipes.folder / "base"
    source = ["--model_name_or_path", base, "--train_only_connections", "--scheme", "block_attnres"]
    options = [
        o for o in OPTIONS if o not in ("--model_type", "llama", "--config_overrides") and "hidden_size" not in o
    ]
    recipes.run(*options, *source, "--output_dir", "tuned")
    tuned = AutoModelForCausalLM.from_pretrained(recipes.folder / "tuned")
    loaded = resswap.load_connections(AutoModelForCausalLM.from_pretrained(base), recipes.folder / "tuned")
    assert (recipes.folder / "tuned/connections.safetensors").stat().st_size < base.joinpath(
        "model.safetensors"
    ).stat().st_size / 10
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, tuned(ids).logits)


ERRORS = {
    "longer than the context": (["--block_size", "128"], "longer than the model's context of 64 tokens"),
    "stream without a column": ([*STREAM, "--text_column_name", "body"], "there is no column 'body' (only: text)"),
    "stream too short": ([*STREAM, "--max_eval_samples", "10000"], "leave none to train on"),
    "stream that is no json": ([*STREAM, "--train_file", "bad.jsonl"], "cannot read"),
    "empty file": (["--train_file", "empty.jsonl"], "the file empty.jsonl is empty"),
    "another precision": (["--mixed_precision", "fp8"], "must be no, bf16 or fp16"),
    "rate of no connections": (["--residual_learning_rate", "1"], "--residual_learning_rate needs a --scheme"),
    "too long a decay": (
        ["--lr_scheduler_type", "warmup_stable_decay", "--num_warmup_steps", "5", "--num_decay_steps", "2"],
        "more than 6 steps",
    ),
    "decay of another schedule": (["--num_decay_steps", "2"], "needs --lr_scheduler_type warmup_stable_decay"),
    "adapters and connections": (
        ["--scheme", "mhc", "--lora_r", "4", "--train_only_connections"],
        "excludes --lora_r",
    ),
    "alpha alone": (["--lora_alpha", "4"], "need --lora_r"),
    "missing config": (["--config", "none.yaml"], "cannot read the options in none.yaml"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_mistakes_are_one_line(recipes, texts, case):
    (recipes.folder / "empty.jsonl").touch()
    (recipes.folder / "bad.jsonl").write_text("no json {")
    options, message = ERRORS[case]
    done = recipes.start(*OPTIONS, *texts, *options, "--output_dir", "none")
    last = done["output"].splitlines()[-1]
    assert done["statuses"] == [2], done["output"]
    assert last.startswith("error: ") and message in last
    assert not (recipes.folder / "none").exists()


def test_a_stream_needs_a_number_of_steps(recipes, texts):
    options = [o for o in OPTIONS if o not in ("--max_train_steps", "6")]
    done = recipes.start(*options, *texts, *STREAM, "--output_dir", "none")
    assert "--streaming needs --max_train_steps" in done["output"].splitlines()[-1]


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(recipes, texts):
    patch = "import sys; sys.modules['wandb'] = None"
    done = recipes.start(*OPTIONS, *texts, "--report_to", "wandb", "--output_dir", "none", patch=patch)
    assert done["output"].splitlines()[-1] == "error: wandb is not installed; run: pip install 'resswap[trackers]'"
