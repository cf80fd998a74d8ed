"""The trainer: a step's loss and gradient, the two teachers, a run that diverges."""

import pytest
import torch
from transformers import TrainerCallback

from bilinearize.finetune.losses import LossWeights
from bilinearize.finetune.teacher import (
    SeparateTeacher,
    SharedTeacher,
    StudentWithTeacher,
    load_teacher,
)
from bilinearize.finetune.trainer import RecoveryTrainer, training_arguments
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.errors import InputError

LENGTHS = (16, 3, 11, 16, 7, 2, 14, 9)


def padded_rows() -> list[dict[str, torch.Tensor]]:
    """8 rows of 16 with very unequal numbers of tokens that count."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(2, 300, (16,), generator=generator)
        mask = (torch.arange(16) < length).long()
        labels = torch.where(mask.bool(), ids, -100)
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return rows


def build(student, teacher, share=True, weights=LossWeights(1.0, 0.2, 1.0)):  # noqa: B008
    model = load_causal_lm(student)
    original, _ = load_teacher(teacher, model, share)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.requires_grad_(True)
    return StudentWithTeacher(model, original, weights, chunk=5)


def arguments(tmp_path, batch_size=4, accumulation=1, weight_decay=0.0):
    return training_arguments(
        tmp_path / "checkpoints",
        learning_rate=1e-3,
        warmup=0.0,
        schedule="constant",
        weight_decay=weight_decay,
        max_grad_norm=0.0,
        batch_size=batch_size,
        accumulation=accumulation,
        save_every=100,
        log_every=1,
        bf16=False,
        seed=0,
    )


class Gradients(TrainerCallback):
    """Keeps the gradients of the last step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.seen = {name: p.grad.clone() for name, p in named if p.grad is not None}


def one_step(model, tmp_path, batch_size, accumulation, trainer_class=RecoveryTrainer):
    """Train one step on the padded rows: its loss and gradients."""
    gradients = Gradients()
    trainer = trainer_class(
        model, arguments(tmp_path, batch_size, accumulation), padded_rows(), callbacks=[gradients]
    )
    trainer.train()
    return trainer.state.log_history[0], gradients.seen


class MeanOfMeans(RecoveryTrainer):
    """The mistake: each micro-batch is divided by its own number of tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        own = (inputs["labels"][:, 1:] != -100).sum() * self.args.gradient_accumulation_steps
        return super().compute_loss(model, inputs, return_outputs, own)


def distance(first, second):
    return max((first[name] - second[name]).abs().max() / first[name].abs().max() for name in first)


def test_a_step_does_not_depend_on_micro_batches(student, pico_llama, tmp_path):
    whole, gradients = one_step(build(student, pico_llama), tmp_path, 8, 1)
    cut, same = one_step(build(student, pico_llama), tmp_path, 2, 4)
    for name in ("loss", "kl", "cross_entropy", "gap"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6)
    assert len(gradients) == 18 and gradients.keys() == same.keys()
    assert distance(gradients, same) < 1e-5
    wrong, other = one_step(build(student, pico_llama), tmp_path, 2, 4, MeanOfMeans)
    assert wrong["loss"] != pytest.approx(whole["loss"], rel=1e-2)
    assert distance(gradients, other) > 1e-2


def test_loss_is_the_mean_over_tokens_that_count(student, pico_llama, tmp_path):
    model = build(student, pico_llama)
    logged, _ = one_step(model, tmp_path, 8, 1)
    ours, theirs = load_causal_lm(student), load_causal_lm(pico_llama)
    kl = cross_entropy = 0.0
    with torch.no_grad():
        for row, length in zip(padded_rows(), LENGTHS, strict=True):
            ids = row["input_ids"][None, :length]
            q, p = (m(ids).logits[0, :-1].double().log_softmax(-1) for m in (ours, theirs))
            kl += (p.exp() * (p - q)).sum().item()
            cross_entropy -= q[torch.arange(length - 1), ids[0, 1:]].sum().item()
    count = sum(LENGTHS) - len(LENGTHS)
    assert logged["kl"] == pytest.approx(kl / count, rel=1e-5)
    assert logged["loss"] == pytest.approx((kl + 0.2 * cross_entropy) / count, rel=1e-5)


def test_shared_teacher_equals_separate_teacher(student, pico_llama):
    batch = {name: torch.stack([row[name] for row in padded_rows()]) for name in padded_rows()[0]}
    shared, separate = (build(student, pico_llama, share) for share in (True, False))
    assert isinstance(shared.teacher, SharedTeacher)
    assert isinstance(separate.teacher, SeparateTeacher)
    count = [sum(p.numel() for p in model.parameters()) for model in (shared, separate)]
    assert count[0] < count[1]
    for model in (shared, separate):
        model.train()
    first, second = shared(**batch), separate(**batch)
    assert torch.allclose(first["parts"], second["parts"], rtol=1e-6)
    assert first["parts"][0] > 1  # a KL of zero would agree as well


def test_the_swap_ends_with_the_block(student, pico_llama):
    model = build(student, pico_llama)
    ids = padded_rows()[0]["input_ids"][None]
    before = model.student(ids).logits
    with pytest.raises(RuntimeError), model.teacher.swapped_into(model.student):
        within = model.student(ids).logits
        raise RuntimeError
    assert torch.equal(model.student(ids).logits, before)
    assert torch.allclose(within, load_causal_lm(pico_llama)(ids).logits, atol=1e-5)
    assert not torch.allclose(within, before, atol=1e-2)


def test_a_teacher_with_another_weight_is_not_shared(student, pico_llama):
    model = load_causal_lm(student)
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] += 1e-3
    teacher, difference = load_teacher(pico_llama, model, share=True)
    assert isinstance(teacher, SeparateTeacher)
    assert difference == "model.layers.1.self_attn.q_proj.weight"


def test_a_teacher_with_another_configuration_is_not_shared(student, pico_llama):
    model = load_causal_lm(student)
    model.config.rms_norm_eps = 1e-3
    _, difference = load_teacher(pico_llama, model, share=True)
    assert difference == "rms_norm_eps in config.json"


def test_weight_decay_spares_biases_and_norms(student, pico_llama, tmp_path):
    model = build(student, pico_llama)
    model.student.requires_grad_(True)
    trainer = RecoveryTrainer(model, arguments(tmp_path, weight_decay=0.1), padded_rows())
    trainer.create_optimizer()
    names = {id(p): name for name, p in model.named_parameters()}
    decay = {
        g["weight_decay"]: {names[id(p)] for p in g["params"]}
        for g in trainer.optimizer.param_groups
    }
    assert all("bias" not in name and "norm" not in name for name in decay[0.1])
    assert len(decay[0.1]) == 3 * 7 + 1
    assert len(decay[0.0]) == 3 * (3 + 2) + 1


@pytest.mark.parametrize("when", ["loss", "weights"])
def test_a_diverging_run_stops(student, pico_llama, tmp_path, when):
    model = build(student, pico_llama)

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if when == "loss" and state.global_step == 1:
                model.student.model.layers[0].mlp.up_proj.weight.data[0] = float("nan")

        def on_optimizer_step(self, args, state, control, **kwargs):
            if when == "weights" and state.global_step == 1:
                model.student.model.layers[0].mlp.up_proj.weight.data[0] = float("inf")

    trainer = RecoveryTrainer(model, arguments(tmp_path), padded_rows(), callbacks=[Poison()])
    expected = (
        r"loss is nan at step 2.*No checkpoint"
        if when == "loss"
        else r"up_proj.weight is no longer finite at step 2"
    )
    with pytest.raises(InputError, match=expected):
        trainer.train()
    assert not list(tmp_path.glob("checkpoints/checkpoint-*"))
