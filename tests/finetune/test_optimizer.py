"""Muon and AdamW as one optimizer: against torch's own two, and in a run."""

import copy

import pytest
import torch
from torch import nn

from bilinearize.finetune.groups import optimizer_groups
from bilinearize.finetune.optimizer import MuonWithAdamW
from bilinearize.finetune.run import finetune
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.errors import InputError

OPTIONS = {"betas": (0.9, 0.99), "eps": 1e-8}


def groups_of(model: nn.Module) -> list[dict]:
    return [
        {"params": [model.weight], "lr": 1e-2, "weight_decay": 0.1, "muon": True},
        {"params": [model.bias], "lr": 1e-3, "weight_decay": 0.0, "muon": False},
    ]


def train(model: nn.Module, optimizers: list, steps: range) -> None:
    for step in steps:
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(5, 7)


def test_equals_torchs_two_optimizers(model):
    apart = copy.deepcopy(model)
    train(model, [MuonWithAdamW(groups_of(model), **OPTIONS)], range(5))
    muon = torch.optim.Muon(
        [apart.weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([apart.bias], lr=1e-3, weight_decay=0.0, **OPTIONS)
    train(apart, [muon, adamw], range(5))
    assert torch.equal(model.weight, apart.weight) and torch.equal(model.bias, apart.bias)


def test_a_restored_one_goes_on_the_same(model):
    optimizer = MuonWithAdamW(groups_of(model), **OPTIONS)
    train(model, [optimizer], range(3))
    again = copy.deepcopy(model)
    other = MuonWithAdamW(groups_of(again), **OPTIONS)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fresh = copy.deepcopy(model)
    train(model, [optimizer], range(3, 6))
    train(again, [other], range(3, 6))
    train(fresh, [MuonWithAdamW(groups_of(fresh), **OPTIONS)], range(3, 6))
    assert torch.equal(model.weight, again.weight) and torch.equal(model.bias, again.bias)
    assert not torch.equal(model.weight, fresh.weight)  # so the state matters
    # A scheduler that sets the rates of the one reaches both parts.
    for group in other.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(again.state_dict())
    train(again, [other], range(6, 7))
    assert all(torch.equal(x, before[name]) for name, x in again.state_dict().items())


def test_muon_takes_the_matrices_inside_the_model(student):
    model = load_causal_lm(student)
    groups = optimizer_groups(model, set(), 0.0, 1e-3, {})
    taken = {id(p) for group in groups if group["muon"] for p in group["params"]}
    named = dict(model.named_parameters())
    assert {name for name, p in named.items() if id(p) in taken} == {
        name
        for name, p in named.items()
        if p.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name
    }
    assert sum(len(group["params"]) for group in groups) == len(named)


def test_a_run_with_muon_brings_the_divergence_down(job, history, tmp_path):
    out = finetune(**job | {"optimizer": "muon"}, out=tmp_path / "out")
    entries = [entry for entry in history(out) if "kl" in entry]
    assert entries[-1]["kl"] < 0.8 * entries[0]["kl"]


def test_deepspeed_has_no_muon(job, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InputError, match="--optimizer muon does not run under DeepSpeed"):
        finetune(**job | {"optimizer": "muon"}, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())
