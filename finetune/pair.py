"""The module that Trainer wraps: student and teacher on one batch, and the loss."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from bilinearize.finetune.data import IGNORE
from bilinearize.finetune.losses import (
    LossWeights,
    TopTokens,
    layer_errors,
    loss_sums,
    range_excess,
)
from bilinearize.finetune.riding import Homotopy, own_module
from bilinearize.finetune.teacher import decoder_layers, head_of, last_hidden
from bilinearize.model.modeling_bilinear import BilinearMLP

PARTS = ("kl", "cross_entropy", "teacher_cross_entropy", "hidden", "range")


class StudentWithTeacher(nn.Module):
    """Both models and the loss in one forward, as DDP needs it."""

    # Trainer then counts `labels[..., 1:]`, and hands that count to `compute_loss`.
    loss_type = "ForCausalLM"
    accepts_loss_kwargs = True

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: Any,
        weights: LossWeights,
        chunk: int,
        homotopy: Homotopy | None = None,
    ):
        """`teacher` is one of teacher.py or cache.py, or None."""
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.weights = weights
        self.chunk = chunk
        self.homotopy = homotopy
        self.largest_score = 0.0
        self.config = copy.deepcopy(student.config)  # Trainer changes `use_cache` in it
        self._no_split_modules = student._no_split_modules  # what FSDP shards one by one

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        teacher_values: torch.Tensor | None = None,
        teacher_tokens: torch.Tensor | None = None,
        teacher_labels: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Sums over the positions whose next token counts.

        Args:
            input_ids, labels: (batch, length); labels unshifted, -100 where a token does not count.
            attention_mask: (batch, length), 0 at padding.
            position_ids: (batch, length), beginning anew with each document; none runs on.
            teacher_values, teacher_tokens, teacher_labels: (batch, length - 1, k) twice and (batch,
                length - 1): what a cached teacher knows.

        Returns:
            `loss` (scalar), `parts` (one for each of `PARTS`, unweighted), `count` (scalar,
            positions that count).
        """
        counts = labels[:, 1:] != IGNORE
        options = {"attention_mask": attention_mask, "position_ids": position_ids}
        states: list[list[torch.Tensor]] = [[], [], []]
        theirs = their_head = top = None
        if teacher_values is not None and teacher_tokens is not None and teacher_labels is not None:
            cached = teacher_values, teacher_tokens, teacher_labels
            top = TopTokens(*(tensor[counts] for tensor in cached))
        elif self.teacher is not None and (self.weights.need_teacher or not self.training):
            with torch.no_grad(), self.teacher.runs(self.student) as model:
                with self._captured(model, states[0], states[1]):
                    theirs = last_hidden(model, input_ids, **options)[:, :-1][counts]
                their_head = head_of(model)
        ours: tuple = (states[2], []) if self.weights.target == "state" else ([], states[2])
        scores: list[torch.Tensor] = []
        with self._captured(self.student, *ours), self._scores(scores):
            hidden = last_hidden(self.student, input_ids, **options)[:, :-1][counts]
        labels = labels[:, 1:][counts]
        head = head_of(self.student)
        loss, parts = loss_sums(
            hidden, head, labels, theirs, their_head, self.weights, self.chunk, top
        )
        errors = loss.new_zeros(())
        if self.weights.hidden:
            scale, outputs = states[0], states[0 if self.weights.target == "state" else 1]
            errors = layer_errors(states[2], outputs, scale, counts, self.weights.layers)
            loss = loss + self.weights.hidden * errors
        excess = loss.new_zeros(())
        if self.weights.bound:
            excess, largest = range_excess(scores, counts, self.weights.bound)
            loss = loss + self.weights.range * excess
            self.largest_score = max(self.largest_score, largest.item())
        parts = torch.cat([parts, errors.detach()[None], excess.detach()[None]])
        return {"loss": loss, "parts": parts, "count": counts.sum()}

    def describe(self, sums: list[float], count: float, held_out: bool = False) -> dict[str, float]:
        """What a log entry says of sums over `count` tokens, in nats per token.

        Args:
            sums: of `PARTS`; of the loss and `PARTS` if `held_out`, where all are known.
        """
        *loss, kl, ours, theirs, hidden, excess = (value / max(count, 1.0) for value in sums)
        entry = {"loss": loss[0]} if held_out else {}
        if held_out or self.weights.kl or self.weights.cross_entropy:
            entry["cross_entropy"] = ours
            if self.teacher is not None and (held_out or self.weights.need_teacher):
                entry |= {"kl": kl, "gap": ours - theirs}
        if self.weights.hidden:
            entry["hidden"] = hidden
        if self.weights.bound:
            entry |= {"range": excess, "largest_score": self.largest_score}
            self.largest_score = 0.0
        if self.homotopy is not None:
            entry["t"] = self.homotopy.t
        return entry

    @contextmanager
    def _captured(
        self, model: PreTrainedModel, streams: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> Iterator[None]:
        """Within the block, collect each layer's output and its MLP's, if the loss compares them.

        The hooks are gone by the time that a checkpointed layer is computed again.
        """
        hooks = []
        if self.weights.hidden:
            for layer in decoder_layers(model):
                for module, kept in ((layer, streams), (layer.mlp, outputs)):
                    hooks.append(module.register_forward_hook(_keeper(kept)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _scores(self, kept: list[torch.Tensor]) -> Iterator[None]:
        """Within the block, collect what each converted `down_proj` reads, if that is bounded."""
        hooks = []
        if self.weights.bound:
            for layer in decoder_layers(self.student):
                mlp: Any = own_module(layer.mlp)
                if isinstance(mlp, BilinearMLP):
                    hook = mlp.down_proj.register_forward_pre_hook(lambda m, a: kept.append(a[0]))
                    hooks.append(hook)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _keeper(kept: list[torch.Tensor]) -> Any:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    return keep
