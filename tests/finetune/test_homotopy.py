"""From the original MLPs to bilinear ones: exact at both ends, and in every checkpoint between."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerCallback
from transformers.activations import ACT2FN

from bilinearize.convert.run import convert
from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.riding import AnnealedActivation, BlendedMLP, Homotopy, anneal
from bilinearize.finetune.run import finetune
from bilinearize.finetune.stage import build_stage, check_quadratic
from bilinearize.finetune.trainer import RecoveryTrainer
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.errors import InputError
from bilinearize.model.modeling_bilinear import BilinearMLP

IDS = torch.arange(2, 66)[None]


class Gated(nn.Module):
    """A stock SwiGLU MLP."""

    def __init__(self, size, slots):
        super().__init__()
        self.gate_proj = nn.Linear(size, slots, bias=False)
        self.up_proj = nn.Linear(size, slots, bias=False)
        self.down_proj = nn.Linear(slots, size, bias=False)
        self.act_fn = ACT2FN["silu"]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def fitted(source, alpha, beta, slots=10):
    """A block with the gates `alpha g + beta` of the source, in another gauge."""
    block = BilinearMLP(6, slots, bias=True).double()
    gauge = torch.linspace(-2, 2, slots, dtype=torch.float64)[:, None] + 0.1
    with torch.no_grad():
        block.gate_proj.weight.copy_(alpha * source.gate_proj.weight * gauge)
        block.gate_proj.bias.copy_(beta * gauge[:, 0])
        block.up_proj.weight.copy_(source.up_proj.weight / gauge)
        block.up_proj.bias.zero_()
    return block


@pytest.mark.parametrize("t", [0.0, 0.375, 1.0])
def test_a_blend_of_slots_is_the_formula(t):
    torch.manual_seed(0)
    source, x = Gated(6, 10).double(), torch.randn(7, 6, dtype=torch.float64)
    block = fitted(source, 0.6, 0.2)
    before = block(x)
    mixed = BlendedMLP(block, source)
    assert mixed.slotwise and torch.allclose(block(x), before)
    Homotopy([mixed], 1, "linear").set(t)
    g = source.gate_proj(x)
    gate = (1 - t) * g * g.sigmoid() + t * (0.6 * g + 0.2)
    features = gate * source.up_proj(x)
    expected = (1 - t) * source.down_proj(features) + t * block.down_proj(features)
    assert torch.allclose(mixed(x), expected, rtol=1e-10)
    if t == 0:
        assert torch.equal(mixed(x), source(x))
    if t == 1:
        assert torch.equal(mixed(x), block(x))
    mixed.teaching = True
    assert torch.equal(mixed(x), source(x))


@pytest.mark.parametrize(
    "block",
    [
        BilinearMLP(6, 20, bias=True),
        BilinearMLP(6, 10, rank=2),
        BilinearMLP(6, 10, "bilinear", 1, "silu"),
    ],
)
def test_a_blend_of_other_shapes_mixes_outputs(block):
    torch.manual_seed(0)
    source, x = Gated(6, 10), torch.randn(7, 6)
    mixed = BlendedMLP(block, source)
    assert not mixed.slotwise
    homotopy = Homotopy([mixed], 1, "linear")
    for t, expected in ((0, source(x)), (0.25, 0.75 * source(x) + 0.25 * block(x)), (1, block(x))):
        homotopy.set(t)
        assert torch.allclose(mixed(x), expected, atol=1e-6)
        assert t == 0.25 or torch.equal(mixed(x), expected)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_annealing_ends_are_exact_and_swish_is_swish(name):
    z = torch.linspace(-6, 6, 101, dtype=torch.float64)
    act = AnnealedActivation(ACT2FN[name])
    homotopy = Homotopy([act], 1, "linear")
    homotopy.set(0.0)
    assert torch.equal(act(z), ACT2FN[name](z))
    homotopy.set(1.0)
    assert torch.equal(act(z), z / 2)
    homotopy.set(0.999999)
    assert torch.allclose(act(z), z / 2, atol=1e-4)
    homotopy.set(0.75)
    assert name != "silu" or torch.allclose(act(z), z * (0.25 * z).sigmoid())


def test_t_rises_over_its_share_and_ends_at_one():
    for ease in ("linear", "cosine", "quadratic"):
        path = [Homotopy([], 0.5, ease).at(step, 40) for step in range(40)]
        assert 0 < path[0] < 0.15 and path == sorted(path)
        assert path[18] < 1 and path[19:] == [1.0] * 21
    assert Homotopy([], 0.5, "linear").at(9, 40) == 0.5
    assert Homotopy([], 0.5, "quadratic").at(9, 40) == 0.75


class Bent(BilinearMLP):
    """A block that calls itself bilinear and is not."""

    def features(self, x):
        return super().features(x).tanh()


def test_a_gate_that_stays_is_found():
    torch.manual_seed(0)
    check_quadratic(BilinearMLP(6, 10, rank=2, bias=True), 0)
    with pytest.raises(RuntimeError, match="layer 3 is not bilinear"):
        check_quadratic(Bent(6, 10), 3)


class Watch(TrainerCallback):
    """Keeps the checkpoint of step 4 with its logits, and the logits at the end of training."""

    def __init__(self, pair, folder=None):
        self.pair, self.folder = pair, folder

    def logits(self):
        self.pair.student.eval()
        with torch.no_grad():
            return self.pair.student(IDS).logits

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.middle = self.logits()
            shutil.copytree(f"{args.output_dir}/checkpoint-4", self.folder)

    def on_train_end(self, args, state, control, **kwargs):
        self.end = self.logits()


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """Every trainer that is made from here on, with a `Watch` each."""
    made = []
    build = RecoveryTrainer.__init__

    def init(self, model, *args, **kwargs):
        build(self, model, *args, **kwargs)
        made.append(Watch(model, tmp_path / "kept"))
        self.add_callback(made[-1])

    monkeypatch.setattr(RecoveryTrainer, "__init__", init)
    return made


@pytest.fixture(scope="module")
def gated(pico_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gated") / "gated"
    convert(str(pico_llama), folder, method="gated")
    return folder


SHARE = {"homotopy_share": 0.75}


@pytest.mark.parametrize("kind", ["blend", "swish-beta"])
def test_the_end_is_folded_and_a_checkpoint_between_reproduces(
    kind, step_arguments, job, gated, history, watched, tmp_path
):
    changes = SHARE | {"homotopy": kind} | ({"student": str(gated)} if kind != "blend" else {})
    out = finetune(**job | changes, out=tmp_path / "out")
    t = [entry["t"] for entry in history(out)]
    assert t == pytest.approx([min(1, step / 9) for step in range(1, 13)])
    model = load_causal_lm(out)
    assert json.loads((out / "bilinearize.json").read_text())["form"] == "bilinear"
    if kind == "swish-beta":
        assert "Method `annealed`" in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["bilinear_form"] == "bilinear" and config["model_type"] == "bilinear_llama"
    assert all(layer.mlp.form == "bilinear" for layer in model.model.layers)
    assert torch.allclose(model(IDS).logits, watched[0].end, atol=1e-5)
    # A trainer of its own, in which only the checkpoint says where t stands.
    settings = {k: v for k, v in (job | changes).items() if k not in ("student", "teacher")}
    student, teacher = (Path((job | changes)[name]) for name in ("student", "teacher"))
    pair, _ = build_stage(FinetuneConfig(**settings), student, teacher)
    trainer = RecoveryTrainer(pair, step_arguments(tmp_path), [])
    trainer._load_from_checkpoint(str(watched[0].folder))
    assert pair.homotopy.t == pytest.approx(4 / 9)
    middle = Watch(pair).logits()
    assert torch.equal(middle, watched[0].middle)
    pair.homotopy.set(1.0)
    assert not torch.allclose(Watch(pair).logits(), middle, atol=1e-3)


def test_a_blend_starts_at_the_teacher(job, history, finished, tmp_path):
    out = finetune(**job | {"homotopy": "blend", "homotopy_share": 1.0}, out=tmp_path / "out")
    entries = history(out)
    assert entries[0]["kl"] < 0.2 * history(finished)[0]["kl"] and entries[-1]["t"] == 1


def test_homotopies_that_have_nothing_to_move_are_refused(job, gated, tmp_path):
    with pytest.raises(InputError, match="--method gated first"):
        finetune(**job | {"homotopy": "swish-beta"}, out=tmp_path / "out")
    with pytest.raises(InputError, match="blend needs bilinear layers"):
        finetune(**job | {"homotopy": "blend", "student": str(gated)}, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="ReLU does not tend to z / 2"):
        anneal([SimpleNamespace(mlp=BilinearMLP(6, 10, "gated", activation="relu"))])
