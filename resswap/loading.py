"""Load a converted model without losing a parameter.

This file travels with saved models: it imports nothing but the standard library, torch and transformers.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from resswap.errors import CheckpointError, ResswapError
from resswap.schemes.base import ResidualModule


def load_checked(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a `from_pretrained`, and refuse what it would repair with random numbers or leave out.

    Raises:
        CheckpointError: a file is damaged, or a tensor is missing, left over, or of another shape than described.
    """
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    wants_info = kwargs.pop("output_loading_info", False)
    may_differ = kwargs.pop("ignore_mismatched_sizes", False)
    try:
        model, info = load(*args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
    except Exception as error:
        damaged = None if isinstance(error, ResswapError) else _damaged_file(path, kwargs)
        if damaged is None:
            raise
        raise CheckpointError(f"{damaged} is damaged or incomplete: {error}") from error
    _check_loaded(model, info, path, may_differ)
    return (model, info) if wants_info else model


def _check_loaded(model: PreTrainedModel, info: Mapping[str, Any], path: Any, may_differ: bool) -> None:
    """A head may be new or left over where another one is asked for; the decoder has to be the one described."""
    added = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, ResidualModule))
    same_head = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
    prefix = model.base_model_prefix
    base = model.base_model
    inner = f"{prefix}." if base is not model else ""
    names_in_base = {name for name, _ in base.named_children()} | {prefix}

    for name in sorted(info["missing_keys"]):
        if same_head or name.startswith(inner):
            raise CheckpointError(f"{path}: the weights lack {name}, which config.json asks for.")
    for name in sorted(info["unexpected_keys"]):
        if same_head or name.partition(".")[0] in names_in_base:
            raise CheckpointError(f"{path}: the weights have {name}, which config.json does not ask for.")
    for name, saved, expected in sorted(info["mismatched_keys"], key=lambda key: key[0]):
        if not may_differ or name.startswith(added):
            raise CheckpointError(
                f"{path}: {name} has the shape {tuple(saved)} in the weights, and {tuple(expected)} by config.json."
            )


def _damaged_file(path: Any, kwargs: Mapping[str, Any]) -> Path | None:
    """The first of a model's files that cannot be read."""
    for file in _weight_files(path, kwargs):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            else:
                load_state_dict(str(file), map_location="meta")
        except Exception:  # of many kinds, by the reader of the file; the caller names the file and the first error
            return file
    return None


def _weight_files(path: Any, kwargs: Mapping[str, Any]) -> Iterator[Path]:
    if not isinstance(path, (str, os.PathLike)):
        return
    folder = Path(path)
    if not folder.is_dir():
        names = {key: kwargs[key] for key in ("cache_dir", "revision", "token") if key in kwargs}
        config = cached_file(path, "config.json", local_files_only=True, **names)
        folder = Path(config).parent
    folder = folder / kwargs.get("subfolder", "")
    yield from sorted(folder.glob("*.safetensors.index.json"))
    yield from sorted(folder.glob("*.safetensors"))
