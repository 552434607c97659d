"""Bring converted models to the Hub, with a model card."""

import copyreg
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from resswap.card import is_own_card, model_card
from resswap.configuration import described_scheme
from resswap.errors import CheckpointError
from resswap.surgery import rewritten_methods

# What an earlier model may have left in the repository: shards that a loader would take for those of this one.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "resswap_*.py"]
# Weights are safetensors; nothing that has to be unpickled is uploaded.
_LEFT_OUT = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "checkpoint-*", "*/checkpoint-*"]


def push_to_hub(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    license: str | None = None,
    datasets: Sequence[str] = (),
    command: str | None = None,
    metrics: Mapping[str, float] | None = None,
    figures: Sequence[str] = (),
    tags: Sequence[str] = (),
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload model",
    commit_description: str | None = None,
) -> CommitInfo:
    """Upload a folder that holds a saved converted model, and whatever else is in it, with a model card.

    The card is written to `README.md` in the folder, unless there is one that resswap did not write; one that
    somebody wrote in the repository is kept. An upload that was interrupted goes on where it was when called again.

    Args:
        folder: where `save_pretrained` put the model; tokenizer, figures and logs may lie beside it.
        repo_id: the repository, "name" or "user/name"; it is made if need be.
        license: of the model; that of the base model if not given and known to the Hub.
        datasets: the Hub ids, or names, of what the model was trained and evaluated on.
        command: what it was trained with.
        metrics: name -> value, as measured on held-out data.
        figures: names of image files in the folder.
        tags: more tags than `resswap` and the scheme.
        private: whether a new repository is private; by default the account's setting.
        token: for the Hub; by default the one that you are logged in with.
        revision: the branch to push to, made if need be; by default the main one.
        create_pr: open a pull request instead of committing to the branch.
        commit_message: title of the commit.
        commit_description: text of the commit.

    Returns:
        The commit.

    Raises:
        CheckpointError: the folder does not hold a converted model, or not all the figures.
        huggingface_hub.errors.HfHubHTTPError: the Hub refused; nothing in the folder is lost.
    """
    folder = Path(folder)
    config = _read_config(folder)
    lost = [name for name in figures if not (folder / name).is_file()]
    if lost:
        raise CheckpointError(f"{folder} has no figure {lost[0]}.")
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr") and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    left_out = list(_LEFT_OUT)
    readme = folder / "README.md"
    if not readme.is_file() or is_own_card(readme.read_text(encoding="utf-8")):
        license = license or _license(api, config["residual"].get("base_model"))
        card = model_card(
            config,
            repo_id,
            license=license,
            datasets=datasets,
            command=command,
            metrics=metrics,
            figures=figures,
            tags=tags,
        )
        card.save(readme)
        if not _may_replace_card(api, repo_id, revision):
            left_out.append("README.md")
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        ignore_patterns=left_out,
        delete_patterns=_REPLACED,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message,
        commit_description=commit_description,
    )


class PublishedModel:
    """Mixed into the class of a converted model: what it saves and pushes has a model card."""

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As the family's, with the parameters under their own names, and a `README.md` where there is none."""
        # Trainer and Accelerate load files as they are, without the renamings and mergings of `from_pretrained`.
        kwargs.setdefault("save_original_format", False)
        hub = {}
        if push_to_hub:
            names = ("repo_id", "private", "revision", "create_pr", "commit_message")
            hub = {name: kwargs.pop(name) for name in names if kwargs.get(name) is not None}
        super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory)
        if not kwargs.get("is_main_process", True) or not (folder / "config.json").is_file():
            return
        if not (folder / "README.md").exists():
            model_card(_read_config(folder), folder.resolve().name).save(folder / "README.md")
        if push_to_hub:
            _push(folder, hub.pop("repo_id", folder.name), token=kwargs.get("token"), tags=_tags(self, None), **hub)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | str | None = None,
    ) -> CommitInfo:
        """As `PreTrainedModel.push_to_hub`, with a model card; `resswap.push_to_hub` puts more on the card."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            return _push(
                folder,
                repo_id,
                commit_message=commit_message or "Upload model",
                commit_description=commit_description,
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
                tags=_tags(self, tags),
            )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        base = unpublished_class(type(self))
        if rewritten_methods(base) is not None:
            make, arguments, *state = base.__reduce_ex__(self, protocol)
        else:
            make, arguments, state = copyreg.__newobj__, (base,), [vars(self)]
        return _new_published, (make, arguments), *state


_push = push_to_hub  # which the method of the same name hides


@cache
def published_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The subclass of a model class, of the same name, that saves and pushes with a model card."""
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (PublishedModel, cls), members)


def unpublished_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class that `published_class` derived `cls` from, or `cls` itself."""
    published = [base for base in cls.__mro__ if PublishedModel in base.__bases__]
    return published[0].__bases__[1] if published else cls


def hub_id(name: str | None) -> str | None:
    """`name` if it is that of a repository on the Hub, rather than a folder or nothing."""
    if not name or os.path.exists(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _new_published(make: Callable[..., PreTrainedModel], arguments: tuple[Any, ...]) -> PreTrainedModel:
    model = make(*arguments)
    model.__class__ = published_class(type(model))
    return model


def _tags(model: PreTrainedModel, tags: list[str] | str | None) -> list[str]:
    return [*(model.model_tags or ()), *([tags] if isinstance(tags, str) else tags or ())]


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no config.json that can be read: {error}") from error
    described_scheme(config.get("residual") if isinstance(config, dict) else None)
    return config


def _license(api: HfApi, base_model: str | None) -> str | None:
    """The license that the base model's card states."""
    if base_model is None:
        return None
    try:
        card = api.model_info(base_model).card_data
    except (HfHubHTTPError, OSError, ValueError):
        return None
    return None if card is None else card.get("license")


def _may_replace_card(api: HfApi, repo_id: str, revision: str | None) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = api.hf_hub_download(repo_id, "README.md", revision=revision, local_dir=folder)
        except EntryNotFoundError:
            return True
        return is_own_card(Path(path).read_text(encoding="utf-8"))
