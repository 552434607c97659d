"""Text in, blocks of tokens out: files, data sets of the Hub, or the corpus that every Python carries."""

from itertools import chain
from pathlib import Path
from typing import Any

from common import RecipeError, one_line
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from transformers import PreTrainedTokenizerBase

FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def embedded_corpus() -> list[str]:
    """The documentation that CPython carries for `help()`: about 80 texts, 0.4 MB, nothing to download.

    The texts are in the order of their names, and differ a little from one Python version to the next. A paragraph
    that an earlier text has already is left out (a fifth of all, most of some texts), or training would see what is
    held out.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts = []
    for name in sorted(topics):
        paragraphs = {" ".join(text.split()): text for text in topics[name].split("\n\n")}
        texts.append("\n\n".join(text for key, text in paragraphs.items() if key not in seen))
        seen.update(paragraphs)
    return [text for text in texts if text]


def load_texts(
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    train_file: str | None = None,
    validation_file: str | None = None,
    streaming: bool = False,
) -> DatasetDict | IterableDatasetDict:
    """The documents of a data set or of files, else of the embedded corpus, under `train` and maybe `validation`.

    Each line of a json file and each row of a table is a document; a text file is one document. With `streaming` they
    are read when they are asked for.
    """
    splits = IterableDatasetDict if streaming else DatasetDict
    if dataset_name and train_file:
        raise RecipeError("--dataset_name and --train_file are two sources of text; give one of them")
    if dataset_config_name and not dataset_name:
        raise RecipeError("--dataset_config_name needs --dataset_name")
    if validation_file and not train_file:
        raise RecipeError("--validation_file needs --train_file")

    if dataset_name:
        try:
            texts = load_dataset(dataset_name, dataset_config_name, streaming=streaming)
        except Exception as error:  # whatever the builder, the file system or the Hub raised
            raise RecipeError(f"cannot load the data set {dataset_name!r}: {one_line(error)}") from error
        if "train" not in texts:
            raise RecipeError(f"the data set {dataset_name!r} has no split 'train' (it has: {', '.join(texts)})")
        return splits({split: texts[split] for split in ("train", "validation") if split in texts})
    if train_file:
        files = {"train": train_file, "validation": validation_file}
        return splits({split: _load_file(file, streaming) for split, file in files.items() if file})
    corpus = Dataset.from_dict({"text": embedded_corpus()})
    return splits(train=corpus.to_iterable_dataset() if streaming else corpus)


def _load_file(file: str, streaming: bool) -> Dataset | IterableDataset:
    path = Path(file)
    if path.suffix not in FORMATS:
        raise RecipeError(f"cannot read {file}: the name must end in one of {', '.join(FORMATS)}")
    if not path.is_file():
        raise RecipeError(f"there is no file {file}")
    if path.stat().st_size == 0:
        raise RecipeError(f"the file {file} is empty")
    options: dict[str, Any] = {"sample_by": "document"} if path.suffix == ".txt" else {}
    try:
        return load_dataset(FORMATS[path.suffix], data_files=str(path), split="train", streaming=streaming, **options)
    except Exception as error:  # each builder has its own errors for a malformed file
        cause = error.__cause__ or error
        raise RecipeError(f"cannot read {file} as {FORMATS[path.suffix]}: {one_line(cause)}") from error


def make_blocks(
    texts: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    text_column: str = "text",
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    """Tokenise the documents, join them with the end-of-text token, and cut blocks of `block_size` tokens.

    1000 documents are joined at a time, so a corpus need not fit in memory; what does not fill a block is dropped.
    """
    columns = texts.column_names or list(_first(texts) or [text_column])
    if text_column not in columns:
        raise RecipeError(
            f"there is no column {text_column!r} (only: {', '.join(columns)}); name one with --text_column_name"
        )
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        documents = [text for text in batch[text_column] if text]
        if not all(isinstance(text, str) for text in documents):
            raise RecipeError(f"the column {text_column!r} does not hold text; name one with --text_column_name")
        if not documents:
            return {"input_ids": []}
        ids = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
        stream = list(chain.from_iterable(document + separator for document in ids))
        ends = range(block_size, len(stream) + 1, block_size)
        return {"input_ids": [stream[end - block_size : end] for end in ends]}

    options: dict[str, Any] = {"batched": True, "remove_columns": columns}
    if isinstance(texts, Dataset):
        options |= {"desc": "Cutting blocks", "num_proc": num_proc}
    blocks = texts.map(tokenize, **options)
    if _first(blocks) is None:
        raise RecipeError(f"the text is shorter than one block of {block_size} tokens; lower --block_size or add text")
    return blocks.with_format("torch")


def _first(rows: Dataset | IterableDataset) -> dict[str, Any] | None:
    try:
        return next(iter(rows), None)
    except RecipeError:
        raise
    except Exception as error:  # a stream shows only now that its file is malformed
        raise RecipeError(f"cannot read the text: {one_line(error.__cause__ or error)}") from error


def load_blocks(
    texts: DatasetDict | IterableDatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    validation_split_percentage: float = 5,
    text_column: str = "text",
    num_proc: int | None = None,
    held_out: int | None = None,
) -> tuple[Dataset | IterableDataset, Dataset]:
    """Blocks to train on and blocks held out.

    Without a `validation` split the last `validation_split_percentage` % of the blocks is held out, and at least one:
    a stretch in one piece, so that no block to train on lies between two that are held out. A stream has no end that
    is known: there, the first `held_out` blocks are held out. Of a `validation` split too, no more than `held_out`
    blocks are taken, if that is given.
    """
    blocks = make_blocks(texts["train"], tokenizer, block_size, text_column, num_proc)
    if "validation" in texts:
        evaluation = make_blocks(texts["validation"], tokenizer, block_size, text_column, num_proc)
        return blocks, _head(evaluation, held_out)
    if isinstance(blocks, IterableDataset):
        evaluation, rest = _head(blocks, held_out), blocks.skip(held_out)
        if _first(rest) is None:
            raise RecipeError(
                f"{held_out} held-out blocks leave none to train on; lower --max_eval_samples or add text"
            )
        return rest, evaluation
    if not 0 < validation_split_percentage < 100:
        raise RecipeError("--validation_split_percentage must lie between 0 and 100")
    if len(blocks) < 2:
        raise RecipeError(
            f"the text fills one block of {block_size} tokens only, which leaves none to hold out; "
            "lower --block_size, add text or give --validation_file"
        )
    size = min(max(1, round(len(blocks) * validation_split_percentage / 100)), len(blocks) - 1)
    cut = len(blocks) - size
    return blocks.select(range(cut)), _head(blocks.select(range(cut, len(blocks))), held_out)


def _head(blocks: Dataset | IterableDataset, size: int | None) -> Dataset:
    """The first `size` blocks; those of a stream are kept in memory, as every evaluation asks for them."""
    if isinstance(blocks, IterableDataset):
        return Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in blocks.take(size)]).with_format(
            "torch"
        )
    return blocks if size is None else blocks.select(range(min(size, len(blocks))))
