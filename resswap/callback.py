"""The health of the residual scheme among the logs of transformers' Trainer, and so of TRL's trainers."""

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from resswap.diagnostics import Probe, connection_grad_norm, summary


class ResidualCallback(TrainerCallback):
    """Logs, at each step that the trainer logs, `residual/…`: what `resswap.inspect` measures, summed up as by
    `Report.summary`, and `residual/grad_norm`, the gradient norm of the connections after clipping.

        trainer = Trainer(model, args, ...)
        trainer.add_callback(resswap.ResidualCallback(trainer))

    They go where the trainer's own logs go: to `report_to`, to the progress bar, to `trainer.state.log_history`. Of
    the batches of a step the last one counts. With fp16 gradients are those of the scaled loss.

    Args:
        trainer: whose logs they go to.
        every_connection: also log each number of each connection, as `residual/model.layers.0.attn_connection/spread`;
            see `diagnostics.Measures`.
    """

    def __init__(self, trainer: Trainer, every_connection: bool = False) -> None:
        self._trainer, self._every_connection = trainer, every_connection
        self._probe: Probe | None = None
        self._values: dict[str, float] = {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Watch a step that will be logged."""
        step = state.global_step + 1
        if step % state.logging_steps == 0 or (step == 1 and args.logging_first_step):
            self._probe = Probe(model)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Take the measures while the gradients are there."""
        if self._probe is None:
            return
        self._probe.close()
        measures = self._probe.measures()
        self._values = summary(measures)
        if self._every_connection:
            for each in measures:
                numbers = {name: value for name, value in vars(each).items() if isinstance(value, float)}
                self._values |= {f"{each.name}/{name}": value for name, value in numbers.items()}
        norm = connection_grad_norm(model)
        if norm is not None:
            self._values["grad_norm"] = norm
        self._probe = None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log what was measured, once."""
        values, self._values = self._values, {}
        if values:
            self._trainer.log({f"residual/{name}": value for name, value in values.items()})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave no hook behind."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None
