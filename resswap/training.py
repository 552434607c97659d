"""What training needs to know of a conversion: which parameters are new, and how to group, freeze and keep them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from resswap.configuration import described_dtype, described_scheme, described_towers
from resswap.conversion import convert, revert
from resswap.errors import CheckpointError, OptionError, UnsupportedModelError
from resswap.schemes import ResidualModule

CONNECTIONS_FILE = "connections.safetensors"
_UNDECAYED = re.compile(r"(^|_)(bias|gate|query|scale)s?$")


def added_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that conversion added, by name: the connections' and what goes with them, such as the read-out's.

    Args:
        model: a model, also a wrapped one (DDP, FSDP, PEFT); under PEFT a connection's original and its copies count.

    Returns:
        Name → parameter, in the order of the model; empty if it is not converted.
    """
    owners = tuple(f"{name}." for name in added_modules(model))
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(owners)}


def added_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that conversion added, by name: connections, maps between them, and the streams' two ends."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ResidualModule)}


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, residual_lr: float | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer of torch's interface.

    Matrices decay; vectors and scalars (norms, biases, gates, queries, scales) do not, nor does any parameter of such
    a name. Frozen parameters are left out. Make the groups before the model is sharded.

    Args:
        model: a converted or a plain model, also with adapters.
        lr: learning rate.
        weight_decay: weight decay of what decays.
        residual_lr: learning rate of what conversion added; `lr` if not given.

    Returns:
        Up to four groups with the keys `name`, `params`, `lr` and `weight_decay`; those without parameters are
        left out.

    Raises:
        OptionError: `residual_lr` is given, and no parameter that conversion added is trained.
        UnsupportedModelError: FSDP1 has flattened the parameters, so that matrices cannot be told from vectors.
    """
    added = added_parameters(model)
    groups = {
        name: {"name": name, "params": [], "lr": rate, "weight_decay": decay}
        for part, rate in (("base", lr), ("connections", lr if residual_lr is None else residual_lr))
        for name, decay in ((part, weight_decay), (f"{part}, no decay", 0.0))
    }
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if last == "_flat_param":
            raise UnsupportedModelError("FSDP has flattened the parameters: make the groups before wrapping.")
        if parameter.requires_grad:
            vector = len(getattr(parameter, "ds_shape", parameter.shape)) < 2 or _UNDECAYED.search(last)
            part = "connections" if name in added else "base"
            groups[f"{part}, no decay" if vector else part]["params"].append(parameter)
    filled = [group for group in groups.values() if group["params"]]
    if residual_lr is not None and not any(group["name"].startswith("connections") for group in filled):
        raise OptionError(f"residual_lr={residual_lr}: the model has no connections with parameters that are trained.")
    return filled


def freeze_base(model: PreTrainedModel) -> PreTrainedModel:
    """Train what conversion added, and nothing else ("residual tuning"): sets `requires_grad` of every parameter.

    Args:
        model: a converted model; it is changed in place.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: the model is not converted to a scheme with parameters, or it has adapters.
    """
    _check_has_no_adapters(model, "get_peft_model has frozen the base model already")
    added = added_parameters(model)
    if not added:
        raise UnsupportedModelError(f"{type(model).__name__} has no connections with parameters: nothing would train.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in added)
    return model


def save_connections(
    model: PreTrainedModel, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None
) -> Path:
    """Write only what conversion added to `folder/connections.safetensors`, with the description of the scheme.

    Args:
        model: a converted model whose base has stayed as it was; only its names matter if `state_dict` is given.
        folder: made if it does not exist.
        state_dict: the gathered weights of a sharded model, e.g. `accelerator.get_state_dict(model)`.

    Returns:
        The file.

    Raises:
        UnsupportedModelError: the model is not converted to a scheme with parameters, or it has adapters.
    """
    _check_has_no_adapters(model, "save them with model.save_pretrained, or merge them first")
    added = added_parameters(model)
    if not added:
        raise UnsupportedModelError(f"{type(model).__name__} has no connections with parameters: nothing to save.")
    weights = added if state_dict is None else {name: state_dict[name] for name in added}
    path = Path(folder) / CONNECTIONS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(tensors, path, metadata={"format": "pt", "residual": json.dumps(model.config.residual)})
    return path


def load_connections(
    model: PreTrainedModel, name_or_path: str | Path, *, revision: str | None = None, token: str | bool | None = None
) -> PreTrainedModel:
    """Convert a plain model as `save_connections` found it, in place, and give it the trained connections.

    Args:
        model: the base model that the connections were trained on.
        name_or_path: a folder with `connections.safetensors`, the file itself, or a repository on the Hub.
        revision: branch, tag or commit of the repository on the Hub.
        token: for the Hub; by default the one that you are logged in with.

    Returns:
        The same model.

    Raises:
        CheckpointError: no such file, or it does not fit the model; the model is left exactly as it was.
        UnsupportedModelError: the model cannot be converted.
    """
    path = Path(name_or_path)
    if path.is_dir():
        path = path / CONNECTIONS_FILE
        if not path.is_file():
            raise CheckpointError(f"There is no {CONNECTIONS_FILE} in {name_or_path}.")
    elif not path.exists():
        try:
            path = Path(hf_hub_download(str(name_or_path), CONNECTIONS_FILE, revision=revision, token=token))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"There is no {CONNECTIONS_FILE} in {name_or_path}: {error}") from error
    try:
        with safe_open(path, "pt") as file:
            residual = json.loads((file.metadata() or {}).get("residual", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    convert_as(model, residual)
    added = added_parameters(model)
    problems = [
        f"{name} is {'missing' if found is None else f'of shape {list(found.shape)}'} in the file"
        for name, parameter in added.items()
        if (found := tensors.get(name)) is None or found.shape != parameter.shape
    ] + [f"the model has no {name}" for name in tensors if name not in added]
    if problems:
        revert(model, discard_trained=True)
        raise CheckpointError(f"{path} was made for another model: {problems[0]}.")
    for name, parameter in added.items():
        parameter.data.copy_(tensors[name])
    return model


def convert_as(model: PreTrainedModel, residual: Any) -> None:
    """Convert a model as a `config.residual` describes.

    Raises:
        CheckpointError: it describes nothing that this version of resswap knows.
        UnsupportedModelError: the model cannot be converted.
    """
    scheme = described_scheme(residual).scheme
    dtype, towers = described_dtype(residual), described_towers(residual)
    selection = {name: residual[name] for name in ("layers", "sites") if name in residual}
    convert(model, scheme, towers=towers, param_dtype=dtype, **selection, **residual["options"])


def _check_has_no_adapters(model: nn.Module, remedy: str) -> None:
    if hasattr(model, "peft_config"):
        raise UnsupportedModelError(f"{type(model).__name__} has adapters: {remedy}.")
