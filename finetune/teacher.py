"""The teacher, and the module that runs student and teacher on one batch.

Two teachers: `SharedTeacher` is the student with its original MLPs put back for one pass, for runs
that train nothing else; `SeparateTeacher` is a second, frozen model.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from bilinearize.finetune.losses import LossWeights, loss_sums
from bilinearize.model.checkpoint import load_causal_lm

IGNORE = -100
# Fields of a configuration that do not change what the layers outside the MLPs compute.
NOT_SHARED = (
    "architectures auto_map model_type dtype torch_dtype transformers_version _name_or_path "
    "use_cache bos_token_id eos_token_id pad_token_id hidden_act mlp_bias intermediate_size "
    "quantization_config pretraining_tp initializer_range"
).split()


class SharedTeacher(nn.Module):
    """The student's own weights around the original MLPs, which ride along frozen."""

    mode = "shared"

    def __init__(self, mlps: list[nn.Module]):
        super().__init__()
        self.mlps = nn.ModuleList(mlps).requires_grad_(False)

    @contextmanager
    def swapped_into(self, student: PreTrainedModel) -> Iterator[None]:
        """Within the block, `student` computes what its source did (and has no dropout)."""
        layers, training = decoder_layers(student), student.training
        own = [layer.mlp for layer in layers]
        try:
            student.eval()
            for layer, mlp in zip(layers, self.mlps, strict=True):
                layer.mlp = mlp
            yield
        finally:
            for layer, mlp in zip(layers, own, strict=True):
                layer.mlp = mlp
            student.train(training)

    @torch.no_grad()
    def forward(
        self, student: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, nn.Module]:
        """Last hidden states (batch, length, d), and the head that reads them."""
        with self.swapped_into(student):
            return last_hidden(student, input_ids, attention_mask), head_of(student)


class SeparateTeacher(nn.Module):
    """A second model, frozen."""

    mode = "separate"

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(
        self, student: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, nn.Module]:
        """Last hidden states (batch, length, d), and the head that reads them."""
        self.model.eval()
        hidden = last_hidden(self.model, input_ids, attention_mask)
        return hidden, head_of(self.model)


class StudentWithTeacher(nn.Module):
    """What Trainer wraps: both models and the loss in one forward, as DDP needs it."""

    # Trainer then counts `labels[..., 1:]`, and hands that count to `compute_loss`.
    loss_type = "ForCausalLM"
    accepts_loss_kwargs = True

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: SharedTeacher | SeparateTeacher | None,
        weights: LossWeights,
        chunk: int,
    ):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.weights = weights
        self.chunk = chunk
        self.config = copy.deepcopy(student.config)  # Trainer changes `use_cache` in it

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Sums over the positions whose next token counts.

        Args:
            input_ids, labels: (batch, length); labels unshifted, -100 where a token does not count.
            attention_mask: (batch, length), 0 at padding.

        Returns:
            `loss` (scalar), `parts` (3; see `loss_sums`), `count` (scalar, positions that count).
        """
        counts = labels[:, 1:] != IGNORE
        teacher_hidden = teacher_head = None
        if self.teacher is not None:
            teacher_hidden, teacher_head = self.teacher(self.student, input_ids, attention_mask)
            teacher_hidden = teacher_hidden[:, :-1][counts]
        hidden = last_hidden(self.student, input_ids, attention_mask)[:, :-1][counts]
        head = head_of(self.student)
        labels = labels[:, 1:][counts]
        loss, parts = loss_sums(
            hidden, head, labels, teacher_hidden, teacher_head, self.weights, self.chunk
        )
        return {"loss": loss, "parts": parts, "count": counts.sum()}


def decoder_layers(model: PreTrainedModel) -> list[Any]:
    """The decoder layers, whose `mlp` is what a conversion replaces."""
    base: Any = model.base_model
    return list(base.layers)


def head_of(model: PreTrainedModel) -> nn.Module:
    """The module that makes logits of the last hidden states."""
    return cast(nn.Module, model.get_output_embeddings())


def last_hidden(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """(batch, length) to (batch, length, d): what the head reads."""
    outputs = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    return outputs.last_hidden_state


def load_teacher(
    folder: Path, student: PreTrainedModel, share: bool
) -> tuple[SharedTeacher | SeparateTeacher, str | None]:
    """The teacher for `student`, shared if asked for and possible.

    Returns:
        The teacher, and why it is not shared although asked for (else None).

    Raises:
        InputError: if the teacher's checkpoint is not whole.
    """
    model = load_causal_lm(folder)
    if not share:
        return SeparateTeacher(model), None
    difference = first_difference(student, model)
    if difference is not None:
        return SeparateTeacher(model), difference
    return SharedTeacher([layer.mlp for layer in decoder_layers(model)]), None


def first_difference(student: PreTrainedModel, teacher: PreTrainedModel) -> str | None:
    """The first weight or configuration field outside the MLPs that differs, or None."""
    ours, theirs = (_outside_mlps(model.state_dict()) for model in (student, teacher))
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())[0]
    for name, tensor in ours.items():
        if not torch.equal(tensor, theirs[name]):
            return name
    return _config_difference(student.config, teacher.config)


def _outside_mlps(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if ".mlp." not in name}


def _config_difference(student: PretrainedConfig, teacher: PretrainedConfig) -> str | None:
    ours, theirs = student.to_dict(), teacher.to_dict()
    for name in theirs:
        if name not in NOT_SHARED and ours.get(name) != theirs[name]:
            return f"{name} in config.json"
    return None
