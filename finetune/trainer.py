"""transformers' Trainer with a loss per token and checkpoints that are never torn."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

from bilinearize.finetune.callbacks import HistoryFile, HomotopySchedule, LossBar, SavesOnSignal
from bilinearize.finetune.checkpoints import WEIGHTS, last_good, prune, put, read_weights
from bilinearize.finetune.diagnose import group_norms, largest_layer, memory_gib, not_finite
from bilinearize.finetune.groups import optimizer_groups
from bilinearize.finetune.heldout import heldout_sums
from bilinearize.finetune.optimizer import MuonWithAdamW
from bilinearize.finetune.pair import PARTS, StudentWithTeacher
from bilinearize.finetune.riding import plain_name
from bilinearize.finetune.shards import full, local_state, sharded_state
from bilinearize.model.errors import InputError

SAVING = "saving"
BEST = "best"
DIVERGED = 3.0
"""A loss this many times that of the start stops the run, if it is more than `SMALL`."""
SMALL, SPAN = 0.5, 5


class RecoveryTrainer(Trainer):
    """Trains a `StudentWithTeacher`.

    The loss of a step is a sum over its tokens divided by their number, over all micro-batches and
    processes, so it does not depend on how the step is cut. A checkpoint holds what trains, written
    aside and renamed when all processes are done with it.

    Raises:
        InputError: when the loss or a weight stops being finite, the loss grows to `DIVERGED` times
            its start, or a checkpoint can't be written.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: StudentWithTeacher,
        args: TrainingArguments,
        train_dataset: Any,
        keep_checkpoints: int = 1,
        history: Path | None = None,
        rates: dict[str, float] | None = None,
        tokens_before: int = 0,
        keep_best: bool = False,
        muon: bool = False,
        **kwargs: Any,
    ):
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        self.pair = model
        self.folder = Path(str(args.output_dir))
        self.keep_checkpoints, self.keep_best = keep_checkpoints, keep_best
        self.rates, self.tokens_before, self.muon = rates or {}, tokens_before, muon
        self._parts = torch.zeros(len(PARTS) + 1, dtype=torch.float32, device=args.device)
        self._norms: dict[str, float] = {}
        self._inputs: dict[str, Any] = {}
        self._clock = 0.0, 0  # when the last entry was made, and the tokens trained on by then
        self.remove_callback(ProgressCallback)
        if not args.disable_tqdm:
            self.add_callback(LossBar)
        self.add_callback(HistoryFile(history))
        self.signal = SavesOnSignal(self.accelerator)
        self.add_callback(self.signal)
        if model.homotopy is not None:
            self.add_callback(HomotopySchedule(model.homotopy))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW, or Muon with it; a learning rate for each group, no decay on biases and norms."""
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            student: Any = self.pair.student
            decayed = set(self.get_decay_parameter_names(student))
            rate = self.args.learning_rate
            groups = optimizer_groups(student, decayed, self.args.weight_decay, rate, self.rates)
            self.optimizer = (MuonWithAdamW if self.muon else kind)(groups, **options)
        return self.optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """This micro-batch's share of the step's loss, times the processes DDP averages over."""
        self._inputs = inputs
        outputs = model(**inputs)
        processes = self.accelerator.num_processes
        finite: Any = outputs["loss"].isfinite().float()
        if processes > 1:  # all stop together
            finite = self.accelerator.reduce(finite, "mean")
        if finite.item() < 1:
            self._stop(f"the loss is {outputs['loss'].item()}", self.state.global_step + 1)
        self._parts += torch.cat([outputs["parts"].float(), outputs["count"].float()[None]])
        items = torch.as_tensor(num_items_in_batch).clamp(min=1)
        loss = outputs["loss"] * processes / items
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        total: Any = super()._get_grad_norm(model, grad_norm)
        total = full(total) if isinstance(total, torch.Tensor) else total
        step = self.state.global_step + 1
        if any(step % every == 0 for every in (self.state.logging_steps, self.state.save_steps)):
            norms = group_norms(self.pair.student)  # none under DeepSpeed, which keeps them
            clips = grad_norm is not None and bool(norms)
            scale = max(1.0, float(total) / self.args.max_grad_norm) if clips else 1.0
            self._norms = {f"grad_norm_{name}": norm * scale for name, norm in norms.items()}
        return total

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._init_training_state(*args, **kwargs)
        self._clock = time.monotonic(), self._tokens_trained()
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss since the last entry, in nats per token, and the speed."""
        if "loss" in logs:
            sums: Any = self.accelerator.reduce(self._parts, "sum")
            *parts, count = sums.tolist()
            self._parts.zero_()
            logs |= self.pair.describe(parts, count) | self._norms | self._progress()
            self._check_growth(logs["loss"])
        super().log(logs, start_time)

    def _progress(self) -> dict[str, float]:
        trained = self._tokens_trained()
        now, (before, already) = time.monotonic(), self._clock
        self._clock = now, trained
        return {
            "tokens": self.tokens_before + trained,
            "tokens_per_second": round((trained - already) / (now - before), 1),
            "memory_gib": round(memory_gib(), 3),
        }

    def _tokens_trained(self) -> int:
        windows: Any = self.train_dataset
        per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps
        window = len(windows[0]["input_ids"]) if len(windows) else 0
        return self.state.global_step * per_step * self.args.world_size * window

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "heldout",
    ) -> dict[str, float]:
        """The parts of the loss on the held-out windows, in nats per token; logged.

        A resumed run has the entry of its first step already.
        """
        if self.state.global_step and not self.control.should_evaluate:
            return {}
        begun = time.monotonic()
        model: Any = self.model_wrapped if self.is_in_train else self.model
        parts, count = heldout_sums(
            model, self.eval_dataset, self.args.eval_batch_size, self.accelerator
        )
        metrics = {f"heldout_{k}": v for k, v in self.pair.describe(parts, count, True).items()}
        self.log(metrics)
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.state.global_step == 0:  # later, Trainer asks
            self._determine_best_metric(metrics, None)
        self._clock = self._clock[0] + time.monotonic() - begun, self._clock[1]
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Keep the weights with the least held-out loss, once a homotopy is at its end."""
        homotopy = self.pair.homotopy
        if not (self.keep_best and metrics) or (homotopy is not None and homotopy.t < 1):
            return False
        best = self.state.best_metric
        if best is not None and metrics["heldout_loss"] >= best:
            return False
        self.state.best_metric = metrics["heldout_loss"]
        self._put(BEST, lambda folder: self._save(str(folder)))
        return True

    # Trainer saves into this folder; `_save_checkpoint` moves the result to where resuming looks.
    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder / SAVING)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.check_weights()
        save = super()._save_checkpoint
        self._put(f"checkpoint-{self.state.global_step}", lambda _: save(model, trial))
        if self.args.should_save:
            prune(self.folder, self.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _put(self, name: str, write: Any) -> None:
        put(
            self.folder / name, write, self.folder / SAVING, self.accelerator, self.args.should_save
        )

    def trained_parameters(self) -> dict[str, torch.Tensor]:
        """What trains, by its name in the student; of a sharded model the shards."""
        named = self.pair.student.named_parameters()
        return {plain_name(name): tensor for name, tensor in named if tensor.requires_grad}

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """What trains, whole; of a sharded model in the main process only, on the CPU.

        All processes have to call this.
        """
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        whole = {}
        for name, tensor in self.trained_parameters().items():
            tensor = full(tensor).detach()
            if self.args.should_save or not sharded:
                whole[name] = tensor.cpu() if sharded else tensor
        return whole

    def best_tensors(self) -> dict[str, torch.Tensor]:
        """What training ends with: the best on the held-out text if kept, else the last."""
        if self.state.best_metric is None:
            return self.trained_tensors()
        return load_file(self.folder / BEST / WEIGHTS)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what trains as one file, however it is sharded."""
        self._save(output_dir)

    # A sharded run is resumed by as many processes; each keeps its shards of the optimizer's state.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        optimizer: Any = self.optimizer
        torch.save(local_state(optimizer.state_dict()), self._shard_file(output_dir))
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_fsdp_enabled:
            return super()._load_optimizer_and_scheduler(checkpoint)
        optimizer: Any = self.optimizer
        scheduler: Any = self.lr_scheduler
        state = torch.load(self._shard_file(checkpoint), map_location="cpu", weights_only=True)
        optimizer.load_state_dict(sharded_state(state, optimizer))
        file = os.path.join(checkpoint, SCHEDULER_NAME)
        scheduler.load_state_dict(torch.load(file, weights_only=True))

    def _shard_file(self, folder: str) -> str:
        return os.path.join(folder, f"optimizer-{self.args.process_index}.pt")

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        tensors = self.trained_tensors()
        if self.args.should_save:
            folder = Path(output_dir or self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            homotopy = self.pair.homotopy
            metadata = {"step": str(self.state.global_step)}
            if homotopy is not None:
                metadata["t"] = repr(homotopy.t)
            save_file(tensors, folder / WEIGHTS, metadata)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        metadata = read_weights(Path(resume_from_checkpoint), self.trained_parameters())
        if self.pair.homotopy is not None:
            self.pair.homotopy.set(float(metadata["t"]))

    def check_weights(self) -> None:
        """Raise InputError if a trained weight is not finite."""
        name = not_finite(self.trained_parameters(), self.accelerator)
        if name is not None:
            self._stop(f"{name} is no longer finite", self.state.global_step)

    def _check_growth(self, loss: float) -> None:
        """Stop if the loss, over the last `SPAN` steps or more, is `DIVERGED` times its start.

        Along a homotopy it has to grow, so that counts from its end on.
        """
        step = self.state.global_step
        past = [e for e in self.state.log_history if "loss" in e and e.get("t", 1) == 1]
        if not past or step - past[0]["step"] < SPAN:
            return
        recent = [e["loss"] for e in past if e["step"] > step - SPAN] + [loss]
        start, now = past[0]["loss"], sum(recent) / len(recent)
        if now > max(DIVERGED * start, SMALL):
            self._stop(f"the loss is {now:.4g}, and was {start:.4g} at first,", step)

    def _stop(self, what: str, step: int) -> None:
        model: Any = self.model_wrapped
        layer, norm = largest_layer(model, self.pair, self._inputs)
        raise InputError(
            f"{what} at step {step}; of all layers the output of layer {layer} is largest (norm "
            f"{norm:.3g}); lower --learning_rate or --max_grad_norm.{last_good(self.folder)}"
        )
