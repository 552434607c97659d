"""recipes/data.py: every format, the cut into blocks, the held-out split, and what is said of bad input."""

import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from transformers import ByT5Tokenizer, MistralConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from arguments import ModelArguments  # noqa: E402
from common import RecipeError, parse_options  # noqa: E402
from data import embedded_corpus, load_blocks, load_texts, make_blocks  # noqa: E402
from models import load_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return ByT5Tokenizer(extra_ids=0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, documents):
    if path.suffix == ".txt":
        path.write_text("".join(documents))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"text": text} for text in documents]))
    else:
        Dataset.from_dict({"text": documents}).to_parquet(path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", ["one\n\ntwo\nthree"]),  # a text file is one document, with its line breaks
        ("a.jsonl", ["one\n\n", "two\nthree"]),
        ("a.json", ["one\n\n", "two\nthree"]),
        ("a.parquet", ["one\n\n", "two\nthree"]),
    ],
)
def test_formats(tmp_path, name, expected):
    texts = load_texts(train_file=write(tmp_path / name, ["one\n\n", "two\nthree"]))
    assert list(texts["train"]["text"]) == expected
    assert list(texts) == ["train"]


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "a.txt"
    load_texts(train_file=write(path, ["before"]))
    assert list(load_texts(train_file=write(path, ["afterwards"]))["train"]["text"]) == ["afterwards"]


def test_data_set_folder_with_a_validation_split(tmp_path):
    write(tmp_path / "train.jsonl", ["to train on"])
    write(tmp_path / "validation.jsonl", ["held out"])
    texts = load_texts(dataset_name=str(tmp_path))
    assert list(texts["train"]["text"]) == ["to train on"]
    assert list(texts["validation"]["text"]) == ["held out"]


def test_embedded_corpus():
    texts = embedded_corpus()
    assert len(texts) > 50
    assert sum(map(len, texts)) > 300_000
    assert texts == embedded_corpus()
    assert any("try" in text and "finally" in text for text in texts)
    assert list(load_texts()["train"]["text"]) == texts


def test_embedded_corpus_holds_no_paragraph_twice():
    """The topic `compound` holds all of `while` and `with`: held-out text must not be training text."""
    paragraphs = [" ".join(part.split()) for text in embedded_corpus() for part in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs)) > 1000


def test_blocks_are_the_documents_joined_by_the_end_of_text(tokenizer):
    blocks = make_blocks(Dataset.from_dict({"text": ["abcd", "", "efghi", None, "jk"]}), tokenizer, 4)
    eos = tokenizer.eos_token_id
    stream = [*tokenizer.encode("abcd"), *tokenizer.encode("efghi"), *tokenizer.encode("jk")]
    assert stream.count(eos) == 3  # this tokenizer ends each text itself; blocks must not hold it twice
    assert blocks["input_ids"][:].tolist() == [stream[0:4], stream[4:8], stream[8:12]]
    assert len(stream) == 14  # the last two tokens fill no block


def test_another_text_column(tokenizer):
    texts = Dataset.from_dict({"id": [1, 2], "body": ["abcdefgh", "ijkl"]})
    assert len(make_blocks(texts, tokenizer, 4, text_column="body")) == 3
    with pytest.raises(RecipeError, match="no column 'text'.*id, body.*--text_column_name"):
        make_blocks(texts, tokenizer, 4)
    with pytest.raises(RecipeError, match="'id' does not hold text"):
        make_blocks(texts, tokenizer, 4, text_column="id")


def test_held_out_blocks_are_the_tail_and_always_the_same(tokenizer):
    texts = DatasetDict(train=Dataset.from_dict({"text": ["".join(chr(97 + i) * 4 for i in range(20)) + "end"]}))
    train, held_out = load_blocks(texts, tokenizer, 4, validation_split_percentage=10)
    decode = tokenizer.batch_decode
    assert decode(train["input_ids"][:])[:2] == ["aaaa", "bbbb"]
    assert len(train) == 19
    assert decode(held_out["input_ids"][:]) == ["tttt", "end</s>"]
    again = load_blocks(texts, tokenizer, 4, validation_split_percentage=10)
    assert [blocks["input_ids"][:].tolist() for blocks in again] == [
        train["input_ids"][:].tolist(),
        held_out["input_ids"][:].tolist(),
    ]


def test_a_small_share_still_holds_one_block_out(tokenizer):
    texts = DatasetDict(train=Dataset.from_dict({"text": ["a" * 40]}))
    train, held_out = load_blocks(texts, tokenizer, 4, validation_split_percentage=0.1)
    assert (len(train), len(held_out)) == (9, 1)


def test_a_validation_split_is_used_whole(tokenizer):
    texts = DatasetDict(
        train=Dataset.from_dict({"text": ["a" * 40]}), validation=Dataset.from_dict({"text": ["b" * 8]})
    )
    train, held_out = load_blocks(DatasetDict(texts), tokenizer, 4)
    assert (len(train), tokenizer.batch_decode(held_out["input_ids"][:])) == (10, ["bbbb", "bbbb"])


def test_bad_files(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.jsonl").write_text("no json {")
    for name, message in {
        "empty.txt": "is empty",
        "absent.txt": "there is no file",
        "a.csv": "must end in one of .txt, .json, .jsonl, .parquet",
        "bad.jsonl": "cannot read .* as json",
    }.items():
        with pytest.raises(RecipeError, match=message):
            load_texts(train_file=str(tmp_path / name))


def test_text_that_fills_no_block(tokenizer):
    for documents, message in (
        (["abc"], "shorter than one block of 8"),
        ([""], "shorter"),
        (["abcdefghi"], "hold out"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_blocks(DatasetDict(train=Dataset.from_dict({"text": documents})), tokenizer, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": "a", "train_file": "b"}, "two sources"),
        ({"dataset_config_name": "a"}, "needs --dataset_name"),
        ({"validation_file": "a.txt"}, "needs --train_file"),
    ],
)
def test_options_that_exclude_or_need_each_other(options, message):
    with pytest.raises(RecipeError, match=message):
        load_texts(**options)


@pytest.mark.parametrize("percentage", [0, 100, -1])
def test_split_percentage_out_of_range(tokenizer, percentage):
    texts = DatasetDict(train=Dataset.from_dict({"text": ["a" * 40]}))
    with pytest.raises(RecipeError, match="between 0 and 100"):
        load_blocks(texts, tokenizer, 4, validation_split_percentage=percentage)


def test_parse_options():
    assert parse_options("a=1, b=1e-3,c=true,d=None,e=gelu,f=[1,2],g={'x': 1, 'y': 2},h=") == {
        "a": 1,
        "b": 1e-3,
        "c": True,
        "d": None,
        "e": "gelu",
        "f": [1, 2],
        "g": {"x": 1, "y": 2},
        "h": "",
    }
    assert parse_options(None) == {}
    with pytest.raises(RecipeError, match="'num_streams'; write name=value"):
        parse_options("num_streams")


def test_the_byte_tokenizer_is_found_again_beside_a_model_of_any_type(tmp_path):
    """AutoTokenizer insists on Mistral's own class for models of that type."""
    MistralConfig().save_pretrained(tmp_path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelArguments(model_name_or_path=str(tmp_path)))
    assert isinstance(tokenizer, ByT5Tokenizer) and len(tokenizer) == 259
