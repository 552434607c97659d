"""The command line: `resswap --help`. Exit status 0: done; 1: it could not be done; 2: wrong usage."""

import ast
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import resswap
from resswap.schemes import scheme_config

from . import models

app = typer.Typer(
    name="resswap",
    help="Swap the residual connections of transformers decoders, and look inside.",
    epilog="Exit status: 0 done, 1 could not be done, 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Model = Annotated[str, typer.Argument(help="A folder or a name on the Hub, plain or converted.")]


def explained(command: Callable[..., None]) -> Callable[..., None]:
    """Say what a user can mend in one message instead of a stack trace."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except resswap.OptionError as error:
            raise typer.BadParameter(str(error)) from error
        except (resswap.ResswapError, OSError, ImportError) as error:  # the Hub's errors are OSErrors
            fail(str(error))

    return run


def fail(message: str) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(1)


def show(data: Any, as_json: bool, *shown: Any) -> None:
    """Print data as JSON, or else what a person is to see."""
    if as_json:
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    console = Console()
    for item in shown:
        console.print(item, markup=False, highlight=False, soft_wrap=not isinstance(item, Table))


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(resswap.__version__)
        raise typer.Exit()


@app.command()
@explained
def schemes(as_json: AsJson = False) -> None:
    """The schemes and their options."""
    data, table = [], Table("scheme", "option", "default", "allowed", "what it is")
    for name, config in resswap.available_schemes().items():
        options = [
            {"name": f.name, "default": f.default, "allowed": f.metadata["allowed"], "help": f.metadata["help"]}
            for f in dataclasses.fields(config)
        ]
        data.append({"scheme": name, "preserves_function": config.preserves_function, "options": options})
        for index, each in enumerate(options or [dict.fromkeys(("name", "default", "allowed", "help"), "")]):
            table.add_row("" if index else name, *map(str, each.values()))
        table.add_section()
    show(data, as_json, table)


@app.command()
@explained
def support(
    which: Annotated[
        str | None,
        typer.Argument(metavar="TYPE", help="A model type such as llama, a folder, or a name on the Hub; or all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Whether a model converts, from its source alone. The status is 1 if the one asked for does not.

    Without a type all are looked at, which takes about a minute.
    """
    names = [field.name for field in dataclasses.fields(resswap.Support)]
    found = resswap.support(which if which is None or models.is_model_type(which) else models.read_config(which))
    table = Table(*(Column(name.replace("_", " "), overflow="fold") for name in names))
    for row in [found] if isinstance(found, resswap.Support) else found:
        words = {True: "yes", False: "no", None: "unknown"}
        table.add_row(*(words[v] if v is None or isinstance(v, bool) else str(v) for v in dataclasses.astuple(row)))
    data = [dataclasses.asdict(row) for row in found] if which is None else dataclasses.asdict(found)
    show(data, as_json, table)
    if which is not None and not found.supported:
        raise typer.Exit(1)


@app.command()
@explained
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The model: a folder or a name on the Hub.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder for the converted model.")],
    scheme: Annotated[str, typer.Option(help="One of `resswap schemes`.")] = "mhc",
    option: Annotated[
        list[str] | None, typer.Option("-o", "--option", metavar="NAME=VALUE", help="An option of it; repeatable.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare the logits before, after, and read back from DST; 1 if an exact scheme changed them.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into DST although there is something in it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a saved model, with its tokenizer and generation config, to another folder."""
    options = _options(option or [])
    config = scheme_config(scheme, options)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if target.resolve() == Path(source).resolve() or not target.is_dir():
            fail(f"{target} is {'the model itself' if target.is_dir() else 'a file'}: name another folder.")
        if not overwrite:
            fail(f"{target} is not empty: name another folder, or pass --overwrite.")
    model = models.load_model(source)
    before = models.sample_logits(model) if verify else None
    resswap.convert(model, scheme, **options)
    data = {
        "folder": str(target),
        "scheme": scheme,
        "options": dataclasses.asdict(config),
        "connections": len(resswap.connections(model)),
        "new_parameters": sum(p.numel() for p in resswap.added_parameters(model).values()),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    lines = [f"{data['connections']} connections, {data['new_parameters']:,} of {data['parameters']:,} parameters new"]
    if verify:
        after = models.sample_logits(model)
        data["logit_difference"] = models.difference(before, after)
        lines.append(f"logit difference after conversion: {data['logit_difference']:.3g} of the largest logit")
        if config.preserves_function and not data["logit_difference"] <= models.tolerance(model.dtype):
            fail(f"{lines[-1]}, more than rounding explains. Nothing was written.")
    model.save_pretrained(target)
    tokenizer = models.find_tokenizer(source)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    data["tokenizer"] = tokenizer is not None
    lines.append(f"saved to {target}, {'without' if tokenizer is None else 'with'} a tokenizer")
    if verify:
        again = models.sample_logits(models.load_model(str(target)))
        data["reloaded_difference"] = models.difference(after, again)
        lines.append(f"logit difference when read back: {data['reloaded_difference']:.3g} of the largest logit")
        if not data["reloaded_difference"] <= models.tolerance(model.dtype):
            fail(f"{lines[-1]}, more than rounding explains: do not use {target}.")
    show(data, as_json, *lines)


@app.command()
@explained
def diff(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder or a name on the Hub, or a model type such as llama.")
    ],
    as_json: AsJson = False,
) -> None:
    """What conversion changes, or has changed, in the source of the model. No weights are read."""
    model = models.build_without_weights(name)
    converted = bool(resswap.connections(model))
    text = resswap.diff(model if converted else resswap.convert(model))
    data = {"model": type(model).__name__, "converted": converted, "diff": text}
    styles = {"+": "green", "-": "red", "@": "cyan"}
    show(data, as_json, Text("\n").join(Text(line, styles.get(line[:1], "")) for line in text.splitlines()))


@app.command()
@explained
def inspect(
    name: Model,
    text: Annotated[
        Path | None, typer.Option(help="What the model reads, UTF-8; a few sentences of resswap's if not given.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer's folder or name, if not the model's own.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Another model to compare with, such as the plain one.")] = None,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the report with figures to this HTML file.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text to take.")] = 512,
    as_json: AsJson = False,
) -> None:
    """See what the residual connections of a model do with a text: a table, and a page with figures."""
    try:
        words = models.SAMPLE if text is None else text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise resswap.OptionError(f"{text} is not UTF-8: {error}") from error
    names = [name] if baseline is None else [name, baseline]
    for each in names:
        models.read_config(each)  # a name that is none is to be the first thing said
    ids = models.token_ids(tokenizer or name, words, max_tokens)
    reports = []
    for each in names:
        model = models.load_model(each)
        tokens = models.fitting(model, ids)
        reports.append(resswap.inspect(model, {"input_ids": tokens, "labels": tokens}))
    if out is not None:
        reports[0].save_html(out, *reports[1:])
    data = {**reports[0].to_dict(), "baseline": reports[1].to_dict() if baseline else None}
    show(data, as_json, *map(str, reports), *([] if out is None else [f"written to {out}"]))


@app.command()
@explained
def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that holds a converted model.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help='"name" or "user/name"; made if need be.')],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    license: Annotated[str | None, typer.Option(help="Of the model; by default the base model's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a converted model with a model card. Log in with `hf auth login`, or set HF_TOKEN."""
    with _refusals_explained(repo):
        commit = resswap.push_to_hub(folder, repo, private=private or None, license=license)
    data = {"repo": commit.repo_url.repo_id, "commit": commit.oid, "url": commit.commit_url}
    show(data, as_json, commit.commit_url)


@contextmanager
def _refusals_explained(repo: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # how huggingface_hub says that a name cannot be one
        if isinstance(error, resswap.ResswapError | OSError):
            raise
        raise typer.BadParameter(f"{repo}: {error}") from error


def _options(given: list[str]) -> dict[str, Any]:
    """What `-o` gave, by name."""
    options: dict[str, Any] = {}
    for option in given:
        name, value = _parsed(option)
        if name in options:
            raise typer.BadParameter(f"-o {option}: {name} is given twice.")
        options[name] = value
    return options


def _parsed(option: str) -> tuple[str, Any]:
    """`num_streams=4` as name and value: a number, true or false, a list, or else a text."""
    name, equals, text = option.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"-o {option}: write it as NAME=VALUE, such as num_streams=4.")
    for parse in (json.loads, ast.literal_eval):
        try:
            return name, parse(text)
        except (ValueError, SyntaxError):
            continue
    return name, text


def main() -> None:
    """The entry point `resswap`."""
    app()
