"""The model card of a converted model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import CONFIG_MAPPING

from resswap.auto import model_classes
from resswap.configuration import described_scheme, described_selection
from resswap.selection import Selection
from resswap.version import __version__

MARK = "<!-- Written by resswap. Without this line the card counts as yours and is never overwritten. -->"


def model_card(
    config: Mapping[str, Any],
    repo_id: str,
    *,
    license: str | None = None,
    datasets: Sequence[str] = (),
    command: str | None = None,
    metrics: Mapping[str, float] | None = None,
    figures: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> ModelCard:
    """The card of a saved model.

    Args:
        config: the content of its `config.json`.
        repo_id: where the card says that the model is: a repository, or a folder.
        license: of the model, an identifier of the Hub such as "apache-2.0".
        datasets: the Hub ids, or names, of what it was trained and evaluated on.
        command: what it was trained with.
        metrics: name -> value, as measured on held-out data.
        figures: names of image files beside the card.
        tags: more tags than `resswap` and the scheme.

    Raises:
        CheckpointError: `config` does not describe a converted model.
    """
    residual = config.get("residual")
    scheme = described_scheme(residual)
    auto_class = _auto_class(config)
    numbers = {name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)}
    data = ModelCardData(
        base_model=residual.get("base_model"),
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation" if auto_class == "AutoModelForCausalLM" else None,
        tags=["resswap", scheme.scheme, *tags],
        datasets=list(datasets) or None,
        model_name=repo_id.rpartition("/")[2] if numbers else None,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=datasets[0] if datasets else "text",
                dataset_name=datasets[0] if datasets else "held-out text",
                metric_type=name,
                metric_value=value,
            )
            for name, value in numbers.items()
        ]
        or None,
    )
    sections = [
        MARK,
        _introduction(config, repo_id),
        _options(scheme),
        _usage(repo_id, auto_class, "auto_map" in config),
        _training(command, numbers, figures),
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n")


def is_own_card(card: str) -> bool:
    """Whether a card's text is one that `model_card` made and nobody took over."""
    return MARK in card


def _introduction(config: Mapping[str, Any], repo_id: str) -> str:
    residual = config["residual"]
    base = residual.get("base_model")
    origin = f", converted from [{base}](https://huggingface.co/{base})" if base else ""
    chosen = described_selection(residual)
    where = "each residual add" if chosen == Selection() else "the residual adds" + _where(chosen)
    verb = "is a" if chosen == Selection() else "are each a"
    return (
        f"# {Path(repo_id).name}\n\nA `{residual['base_model_type']}` model{origin}, in which {where} {verb} "
        f"connection of the scheme `{residual['scheme']}`. Made with resswap {__version__}, transformers "
        f"{transformers.__version__}."
    )


def _where(chosen: Selection) -> str:
    """Which adds are swapped, in words."""
    sites = "" if chosen.sites == "all" else f" of type {chosen.sites}"
    return sites + ("" if chosen.layers is None else f" of layers {', '.join(map(str, chosen.layers))}")


def _options(scheme: Any) -> str:
    rows = [
        f"| `{field.name}` | {getattr(scheme, field.name)} | {field.metadata['help']} |"
        for field in dataclasses.fields(scheme)
    ]
    table = "\n".join(["| option | value | |", "|---|---|---|", *rows])
    return f"## Scheme `{scheme.scheme}`\n\n" + (table if rows else "It has no options.")


def _usage(repo_id: str, auto_class: str, has_code: bool) -> str:
    text = f"""## How to load it

With resswap (`pip install resswap`):

```python
import resswap
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{repo_id}")
```"""
    if has_code:
        text += f"""

Without, by the code in this repository (read it first):

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{repo_id}", trust_remote_code=True)
```"""
    return text


def _training(command: str | None, metrics: Mapping[str, float], figures: Sequence[str]) -> str:
    parts = []
    if command:
        parts.append(f"```bash\n{command}\n```")
    if metrics:
        rows = [f"| {name} | {value:.5g} |" for name, value in metrics.items()]
        parts.append("\n".join(["| metric | value |", "|---|---|", *rows]))
    parts += [f"![{Path(name).stem}]({name})" for name in figures]
    return "\n\n".join(["## Training", *parts]) if parts else ""


def _auto_class(config: Mapping[str, Any]) -> str:
    """The Auto class that loads the architecture that was saved."""
    classes = model_classes(CONFIG_MAPPING[config["residual"]["base_model_type"]])
    saved = (config.get("architectures") or [None])[0]
    names = [auto.__name__ for auto, model_class in classes.items() if model_class.__name__ == saved]
    return "AutoModelForCausalLM" if "AutoModelForCausalLM" in names or not names else names[0]
