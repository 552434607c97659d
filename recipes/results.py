"""What a run of train.py leaves behind: the model, run.json, a figure and the draft of a model card."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from huggingface_hub import CommitInfo
from report import plot_runs

import resswap

CARD = """\
---
library_name: {library}
tags: [resswap, {scheme}]
{base}---

# {title}

{model} with the residual scheme `{scheme}`, trained with resswap's `recipes/train.py`. *This card is a draft.*

```python
{load}
```

| | |
|---|---|
| held-out loss, at the start | {first_loss:.4f} |
| held-out loss, at the end | {eval_loss:.4f} (perplexity {perplexity:.2f}) |
| steps | {steps} of {blocks} blocks of {block_size} tokens |
| parameters | {parameters:,}, of them {trained:,} trained and {added:,} in connections |
| tokens per second | {speed:,.0f} |

![Training loss and held-out loss by step](curves.png)

Data: {data}. `run.json` holds every option, the versions and the curves.
"""


def save(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: transformers.PreTrainedTokenizerBase,
    record: dict[str, Any],
    folder: Path,
) -> None:
    """Write the model (under LoRA, the adapter), the tokenizer, run.json, curves.png and README.md.

    Where only connections were trained, they are in a small file of their own as well.
    """
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)  # gathers what FSDP or DeepSpeed sharded
    if not accelerator.is_main_process:
        return
    plain = accelerator.unwrap_model(model)
    if record["arguments"]["train_only_connections"]:
        resswap.save_connections(plain, folder, state_dict=state)
    plain.save_pretrained(folder, state_dict=state)  # takes the tensors out of `state`
    tokenizer.save_pretrained(folder)
    (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    plot_runs({record["scheme"]: record}, folder / "curves.png")
    final = record["final"]
    if not record["arguments"]["push_to_hub"]:
        (folder / "README.md").write_text(card(record, folder.name))
    print(
        f"eval loss {final['eval_loss']:.4f}, perplexity {final['perplexity']:.2f}, "
        f"{1000 * final['seconds_per_step']:.0f} ms per step; saved in {folder}"
    )
    if record["arguments"]["push_to_hub"]:
        commit = push(record, folder)
        print(f"pushed to {commit.repo_url}")


def push(record: dict[str, Any], folder: Path) -> CommitInfo:
    """Upload the folder, with a model card that has the command, the metrics and the figure of the run."""
    arguments, final = record["arguments"], record["final"]
    data = arguments["dataset_name"] or arguments["train_file"]
    return resswap.push_to_hub(
        folder,
        arguments["hub_model_id"] or folder.resolve().name,
        datasets=[data] if data else [],
        command=shlex.join(["accelerate", "launch", "recipes/train.py", *sys.argv[1:]]),
        metrics={"loss": final["eval_loss"], "perplexity": final["perplexity"]},
        figures=["curves.png"],
    )


def card(record: dict[str, Any], title: str) -> str:
    """The draft of a model card in Markdown."""
    arguments, final = record["arguments"], record["final"]
    base = arguments["model_name_or_path"]
    load = "import resswap\nfrom transformers import AutoModelForCausalLM\n\n"
    if arguments["lora_r"]:
        load += f'model = AutoModelForCausalLM.from_pretrained("{base}")\n'
        loader = "resswap.load_adapter" if record["residual"] else "peft.PeftModel.from_pretrained"
        load = load if record["residual"] else load.replace("import resswap", "import peft")
        load += f'model = {loader}(model, "{title}")'
    else:
        load += f'model = AutoModelForCausalLM.from_pretrained("{title}")'
    return CARD.format(
        library="peft" if arguments["lora_r"] else "transformers",
        scheme=record["scheme"],
        base=f"base_model: {base}\n" if base else "",
        title=title,
        model=base or f"A {arguments['model_type'] or arguments['config_name']} model from scratch",
        load=load,
        steps=final["steps"],
        blocks=final["blocks_per_step"],
        block_size=record["data"]["block_size"],
        eval_loss=final["eval_loss"],
        first_loss=record["evaluations"][0]["eval_loss"],
        perplexity=final["perplexity"],
        parameters=final["parameters"],
        trained=final["trained_parameters"],
        added=final["connection_parameters"],
        speed=final["tokens_per_second"],
        data=arguments["dataset_name"] or arguments["train_file"] or "the documentation that CPython carries",
    )
