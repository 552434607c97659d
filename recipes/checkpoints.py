"""Checkpoints to resume from: written whole or not at all, and with all that the next step depends on."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from common import RecipeError


@dataclass
class Progress:
    """How far a run has come. `state_dict` holds what every process needs to go on.

    Attributes:
        step: optimizer steps done.
        epoch, batch: position in the data: which pass over it, and how many batches of that are done.
        history, evaluations, timings: what has been measured so far.
        losses: of this process, since the last point of the training curve.
        seconds: time spent in training.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    timings: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0
    accelerator: Accelerator | None = field(default=None, repr=False)
    gathered: list[list[float]] = field(default_factory=list, repr=False)

    def state_dict(self) -> dict[str, Any]:
        """What one file keeps for all processes."""
        names = "step epoch batch history evaluations timings seconds gathered"
        return {name: getattr(self, name) for name in names.split()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; each process finds its own losses again."""
        for name, value in state.items():
            setattr(self, name, value)
        own = self.gathered[self.accelerator.process_index] if self.gathered else []
        self.losses = list(torch.tensor(own, device=self.accelerator.device).unbind())


def save_checkpoint(
    accelerator: Accelerator, progress: Progress, plan: dict[str, Any], folder: Path, keep: int
) -> None:
    """Write `folder/checkpoint-STEP`; a process that is killed meanwhile leaves the checkpoints before it as they are.

    Args:
        plan: what must be the same in the run that resumes; see `check_plan`.
        keep: how many checkpoints to keep, the newest.
    """
    final = folder / f"checkpoint-{progress.step}"
    partial = folder / f"{final.name}.partial"
    if accelerator.is_main_process:
        for left_over in folder.glob("checkpoint-*.partial"):
            shutil.rmtree(left_over)
        partial.mkdir(parents=True)
        (partial / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
    losses = torch.stack(progress.losses).float()[None] if progress.losses else None
    progress.gathered = [] if losses is None else accelerator.gather(losses).tolist()
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()  # every process has written its part
    if accelerator.is_main_process:
        partial.rename(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def find_checkpoint(wanted: str | None, folder: Path) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` means; None to start from the beginning."""
    present = checkpoints(folder)
    if wanted is None:
        if present:
            raise RecipeError(
                f"{folder} holds {present[-1].name} of another run; --resume_from_checkpoint latest, or give another "
                "--output_dir"
            )
        return None
    if wanted == "latest":
        return present[-1] if present else None
    path = Path(wanted)
    if not (path / "plan.json").is_file():
        raise RecipeError(f"there is no checkpoint in {path}")
    return path


def check_plan(path: Path, plan: dict[str, Any]) -> None:
    """Refuse to resume a checkpoint with options under which the run would not go on as it began."""
    before = json.loads((path / "plan.json").read_text())
    changed = [f"{name} {before.get(name)} -> {plan[name]}" for name in plan if before.get(name) != plan[name]]
    if changed:
        raise RecipeError(f"{path} belongs to a run with other options: {'; '.join(changed)}")
