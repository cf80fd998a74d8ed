"""The trainer: a step's loss and gradient, the two teachers, a run that diverges."""

import json
import resource
import shutil
import signal
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.pair import StudentWithTeacher
from bilinearize.finetune.run import finetune
from bilinearize.finetune.stage import build_stage
from bilinearize.finetune.teacher import SeparateTeacher, SharedTeacher
from bilinearize.finetune.trainer import RecoveryTrainer
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


def build(student, teacher, **settings) -> StudentWithTeacher:
    settings = {"cross_entropy_weight": 0.2, "kl_chunk": 5} | settings
    return build_stage(FinetuneConfig(text="unread", **settings), student, teacher)[0]


class Gradients(TrainerCallback):
    """Keeps the gradients of the last step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.seen = {name: p.grad.clone() for name, p in named if p.grad is not None}


def one_step(model, arguments, trainer_class=RecoveryTrainer):
    """Train one step on the padded rows: its loss and gradients."""
    gradients = Gradients()
    trainer = trainer_class(model, arguments, padded_rows(), callbacks=[gradients])
    trainer.train()
    return trainer.state.log_history[0], gradients.seen


class MeanOfMeans(RecoveryTrainer):
    """The mistake: each micro-batch is divided by its own number of tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        own = (inputs["labels"][:, 1:] != -100).sum() * self.args.gradient_accumulation_steps
        return super().compute_loss(model, inputs, return_outputs, own)


def distance(first, second):
    return max((first[name] - second[name]).abs().max() / first[name].abs().max() for name in first)


def test_a_step_does_not_depend_on_micro_batches(student, pico_llama, step_arguments, tmp_path):
    whole, gradients = one_step(build(student, pico_llama), step_arguments(tmp_path, 8, 1))
    cut, same = one_step(build(student, pico_llama), step_arguments(tmp_path, 2, 4))
    for name in ("loss", "kl", "cross_entropy", "gap"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6)
    assert len(gradients) == 18 and gradients.keys() == same.keys()
    assert distance(gradients, same) < 1e-5
    wrong, other = one_step(build(student, pico_llama), step_arguments(tmp_path, 2, 4), MeanOfMeans)
    assert wrong["loss"] != pytest.approx(whole["loss"], rel=1e-2)
    assert distance(gradients, other) > 1e-2


def test_loss_is_the_mean_over_tokens_that_count(student, pico_llama, step_arguments, tmp_path):
    model = build(student, pico_llama)
    logged, _ = one_step(model, step_arguments(tmp_path, 8, 1))
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
    shared, separate = (
        build(student, pico_llama, teacher_mode=mode) for mode in ("auto", "separate")
    )
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
    model.student.eval()
    before = model.student(ids).logits
    with pytest.raises(RuntimeError), model.teacher.runs(model.student) as teacher:
        within = teacher(ids).logits
        raise RuntimeError
    assert torch.equal(model.student(ids).logits, before)
    assert torch.allclose(within, load_causal_lm(pico_llama)(ids).logits, atol=1e-5)
    assert not torch.allclose(within, before, atol=1e-2)


def test_a_teacher_with_another_weight_or_configuration_is_not_shared(
    student, pico_llama, tmp_path
):
    changed = shutil.copytree(student, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name][0, 0] += 1e-3
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    config = FinetuneConfig(text="unread")
    pair, described = build_stage(config, changed, pico_llama)
    assert isinstance(pair.teacher, SeparateTeacher)
    assert f"not shared: {name} differs" in described
    fields = json.loads((student / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (changed / "config.json").write_text(json.dumps(fields))
    shutil.copy(student / "model.safetensors", changed)
    pair, described = build_stage(config, changed, pico_llama)
    assert isinstance(pair.teacher, SeparateTeacher)
    assert "rms_norm_eps in config.json differs" in described


def test_each_group_has_its_rate_and_decay_spares_biases_and_norms(
    student, pico_llama, step_arguments, tmp_path
):
    model = build(student, pico_llama, train="all")
    rates = {"mlp": 1e-2, "rest": 1e-4}
    trainer = RecoveryTrainer(
        model, step_arguments(tmp_path, weight_decay=0.1), padded_rows(), rates=rates
    )
    trainer.create_optimizer()
    names = {id(p): name for name, p in model.student.named_parameters()}
    groups = defaultdict(set)
    for group in trainer.optimizer.param_groups:
        groups[group["lr"], group["weight_decay"]] |= {names[id(p)] for p in group["params"]}
    counts = {key: len(group) for key, group in groups.items()}
    # 3 layers: 3 MLP weights and 3 biases, 4 attention weights, 2 norms; embedding, last norm.
    assert counts == {(1e-2, 0.1): 9, (1e-2, 0): 9, (1e-4, 0.1): 13, (1e-3, 0): 7}
    assert all("norm" in name for name in groups[1e-3, 0])
    assert all("bias" in name for name in groups[1e-2, 0])


@pytest.mark.parametrize("when", ["loss", "weights"])
def test_a_diverging_run_stops(student, pico_llama, step_arguments, tmp_path, when):
    model = build(student, pico_llama)

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if when == "loss" and state.global_step == 1:
                model.student.model.layers[0].mlp.own.up_proj.weight.data[0] = float("nan")

        def on_optimizer_step(self, args, state, control, **kwargs):
            if when == "weights" and state.global_step == 1:
                model.student.model.layers[0].mlp.own.up_proj.weight.data[0] = float("inf")

    trainer = RecoveryTrainer(model, step_arguments(tmp_path), padded_rows(), callbacks=[Poison()])
    expected = (
        r"loss is nan at step 2; .*layer 0 is largest \(norm inf\).*No checkpoint"
        if when == "loss"
        else r"up_proj.weight is no longer finite at step 2"
    )
    with pytest.raises(InputError, match=expected):
        trainer.train()
    assert not list(tmp_path.glob("checkpoints/checkpoint-*"))


def test_a_loss_that_grows_stops(job, tmp_path):
    hot = job | {"loss": "hidden", "learning_rate": 1.0, "save_every": 1}
    with pytest.raises(
        InputError, match=r"the loss is .*, and was .* at first, at step \d+; of all"
    ):
        finetune(**hot, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def little_room():
    """Files can't grow beyond 200 kB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_leaves_the_previous_checkpoint(
    job, finished, weights, little_room, tmp_path, monkeypatch
):
    class Fill(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 6:
                little_room()

    build = RecoveryTrainer.__init__

    def init(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.add_callback(Fill())

    with monkeypatch.context() as patched:
        patched.setattr(RecoveryTrainer, "__init__", init)
        expected = r"checkpoint-8: can't be written \(.*Last good checkpoint: .*checkpoint-4"
        with pytest.raises(InputError, match=expected):
            finetune(**job, out=tmp_path / "out")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    left = tmp_path / "out.work" / "stage-0" / "checkpoints"
    assert [path.name for path in left.iterdir()] == ["checkpoint-4"]
    out = finetune(**job, out=tmp_path / "out")
    ours, theirs = weights(out), weights(finished)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_log_has_speed_memory_and_a_norm_for_each_group(job, history, tmp_path):
    run = job | {"train": "all", "learning_rate": 1e-4, "max_grad_norm": 0.1, "tokens": 32 * 4 * 4}
    entries = history(finetune(**run, out=tmp_path / "out"))
    assert [entry["tokens"] for entry in entries] == [128, 256, 384, 512]
    for entry in entries:
        assert entry["tokens_per_second"] > 0 and 0.1 < entry["memory_gib"] < 100
        groups = [entry[f"grad_norm_{group}"] for group in ("mlp", "norms", "rest")]
        total = sum(norm**2 for norm in groups) ** 0.5
        assert total == pytest.approx(entry["grad_norm"], rel=1e-3) and total > 0.1
