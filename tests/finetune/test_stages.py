"""Stages one after the other, what trains in them, and the losses they have."""

import json

import pytest
import torch

from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.run import finetune
from bilinearize.finetune.stage import build_stage
from bilinearize.finetune.teacher import SharedTeacher
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.errors import InputError

STEP = 32 * 4
STAGES = [
    {"loss": "hidden", "tokens": 4 * STEP, "hidden_target": "mlp"},
    {"loss": "logits", "tokens": 6 * STEP, "homotopy": "blend", "train": "mlp+norms"},
    {"loss": "lm", "tokens": 2 * STEP, "train": "all", "learning_rate": 1e-3},
]
IDS = torch.arange(2, 66)[None]


@pytest.fixture(scope="module")
def staged(job, tmp_path_factory):
    return finetune(**job | {"stages": STAGES}, out=tmp_path_factory.mktemp("staged") / "out")


def test_stages_follow_one_another_and_are_logged(staged, history):
    record = json.loads((staged / "finetune.json").read_text())
    assert [stage["steps"] for stage in record["stages"]] == [4, 6, 2]
    assert [stage["teacher"] for stage in record["stages"]] == ["shared", "shared", None]
    assert record["steps"] == 12 and record["tokens"] == 12 * STEP
    entries = history(staged)
    assert [(entry["stage"], entry["step"]) for entry in entries] == [
        *((0, step) for step in range(1, 5)),
        *((1, step) for step in range(1, 7)),
        *((2, step) for step in range(1, 3)),
    ]
    assert "hidden" in entries[0] and "kl" not in entries[0]
    assert "kl" in entries[5] and entries[5]["t"] == 1 and "hidden" not in entries[5]
    assert entries[-1]["loss"] == pytest.approx(entries[-1]["cross_entropy"], rel=1e-5)
    assert load_causal_lm(staged)(IDS).logits.isfinite().all()


def test_a_stage_begins_where_the_last_one_ended(staged, job, weights, history, tmp_path):
    """The second stage alone, on the first one's result, but with the first windows."""
    first = finetune(**job | {"stages": STAGES[:1]}, out=tmp_path / "first")
    second = job | {"student": str(first), "stages": STAGES[1:2]}
    out = finetune(**second, out=tmp_path / "second")
    ours, theirs = history(out), history(staged)[4:10]
    assert ours[0]["t"] == theirs[0]["t"] and ours[0]["loss"] != theirs[0]["loss"]
    changed = {n for n, x in weights(out).items() if not torch.equal(x, weights(first)[n])}
    assert all(".mlp." in name or "norm" in name for name in changed)
    assert any("input_layernorm" in name for name in changed) and "model.norm.weight" in changed


@pytest.mark.parametrize(
    "stages, message",
    [
        ([{"loss": "lm"}], "stage 0 has no tokens"),
        ([{"tokens": 512, "window": 64}], "stage 0 sets 'window'; a stage sets any of loss"),
        ([{"tokens": 512}, {"tokens": 512, "loss": "mse"}], "stage 1: --loss is 'mse'; use one of"),
        ([{"tokens": 512, "rates": {"heads": 1.0}}], "--rates is 'heads'; name groups among"),
        ([{"tokens": 512, "layer_weights": [1, 2]}], "layer_weights has 2 entries for 3 layers"),
        ([{"tokens": 127}], "less than one step"),
    ],
)
def test_bad_stages_are_one_line(job, tmp_path, stages, message):
    with pytest.raises(InputError, match=message):
        finetune(**job | {"stages": stages}, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def pair_of(student, teacher, **settings):
    config = FinetuneConfig(text="unread", **settings)
    return build_stage(config, student, teacher)[0]


@pytest.mark.parametrize("target", ["state", "mlp"])
def test_the_error_of_layers_is_the_formula(student, pico_llama, target):
    layers = [0.5, 2.0, 0.0]
    pair = pair_of(student, pico_llama, loss="hidden", hidden_target=target, layer_weights=layers)
    batch = torch.randint(2, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = batch.clone()
    labels[1, 9:] = -100
    found = pair.train()(batch, labels)
    kept = {}
    for name, folder in (("ours", student), ("theirs", pico_llama)):
        model = load_causal_lm(folder)
        for index, layer in enumerate(model.model.layers):
            for kind, module in (("state", layer), ("mlp", layer.mlp)):
                key = name, kind, index
                module.register_forward_hook(
                    lambda m, a, out, key=key: kept.__setitem__(key, out.detach())
                )
        model(batch)
    counts = labels[:, 1:] != -100
    expected = 0.0
    for index, weight in enumerate(layers):
        ours, theirs = (kept[name, target, index][:, :-1] for name in ("ours", "theirs"))
        power = kept["theirs", "state", index][:, :-1].square().sum(-1)
        error = (ours - theirs).square().sum(-1) / power
        expected += weight * error[counts].sum().item() / 3
    assert expected > 0.1
    assert found["loss"].item() == pytest.approx(expected, rel=1e-5)
    assert found["parts"][3] == found["loss"] and found["parts"][0] == 0
    found["loss"].backward()
    grads = [layer.mlp.own.up_proj.weight.grad for layer in pair.student.model.layers]
    # The last layer has no weight: nothing it computes is compared.
    assert grads[0].abs().sum() > 0 and (grads[2] is None or grads[2].abs().sum() == 0)


def test_memory_savers_change_no_gradient_of_hidden_errors(student, pico_llama):
    batch = torch.randint(2, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    gradients = []
    for saver in (False, True):
        settings = {"loss": "logits", "hidden_weight": 0.5, "gradient_checkpointing": saver}
        pair = pair_of(student, pico_llama, **settings).train()
        pair(batch, batch)["loss"].backward()
        gradients.append([p.grad for p in pair.student.parameters() if p.requires_grad])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_hidden_matching_brings_the_layers_nearer(job, history, tmp_path):
    out = finetune(**job | {"loss": "hidden"}, out=tmp_path / "out")
    entries = history(out)
    assert entries[-1]["hidden"] < 0.7 * entries[0]["hidden"]


def test_norms_train_beside_a_shared_teacher(student, pico_llama):
    pair = pair_of(student, pico_llama, train="mlp+norms").train()
    assert isinstance(pair.teacher, SharedTeacher)
    batch = torch.randint(2, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in pair.student.named_parameters():
            if "norm" in name and parameter.requires_grad:
                parameter.mul_(1.5)
    with pair.teacher.runs(pair.student) as teacher, torch.no_grad():
        theirs = teacher(batch).logits
    assert torch.allclose(theirs, load_causal_lm(pico_llama)(batch).logits, atol=1e-5)
    assert not torch.allclose(pair.student(batch).logits, theirs, atol=0.1)


def test_lora_trains_beside_a_shared_teacher_and_is_merged(
    job, student, pico_llama, weights, tmp_path, capsys
):
    out = finetune(**job | {"train": "lora", "lora_rank": 2}, out=tmp_path / "out")
    assert "the MLPs, and LoRA on the rest" in capsys.readouterr().out
    assert json.loads((out / "finetune.json").read_text())["teacher"] == "shared"
    before, after = weights(student), weights(out)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        difference = tensor - before[name]
        if "self_attn" in name:
            assert torch.linalg.matrix_rank(difference, rtol=1e-3) == 2
        else:
            assert (difference.abs().sum() > 0) == (".mlp." in name)
    pair = pair_of(student, pico_llama, train="lora")
    with torch.no_grad():
        for name, parameter in pair.student.named_parameters():
            if "lora_B" in name:
                parameter.add_(1.0)
    with pair.teacher.runs(pair.student) as teacher, torch.no_grad():
        theirs = teacher(IDS).logits
    assert torch.allclose(theirs, load_causal_lm(pico_llama)(IDS).logits, atol=1e-5)
    assert not torch.allclose(pair.student(IDS).logits, theirs, atol=0.1)


def test_the_control_is_the_teacher_finetuned_alike(job, pico_llama, weights, history, tmp_path):
    run = job | {"loss": "lm", "train": "all", "learning_rate": 1e-3, "homotopy": "blend"}
    out = finetune(**run | {"control": True}, out=tmp_path / "control")
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama" and "auto_map" not in config
    before, after = weights(pico_llama), weights(out)
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    entries = history(out)
    ids = load_causal_lm(out)
    assert entries[-1]["loss"] < entries[0]["loss"] and ids(IDS).logits.isfinite().all()
    towards = finetune(**job | {"control": True, "learning_rate": 1e-4}, out=tmp_path / "towards")
    assert history(towards)[0]["kl"] == pytest.approx(0, abs=1e-6)  # it is its own teacher
