"""The penalty on large products, and compiled layers."""

import pytest
import torch

from bilinearize.finetune.losses import range_excess
from bilinearize.finetune.run import finetune
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.errors import InputError

IDS = torch.arange(2, 66)[None]


def largest_score(folder):
    model, found = load_causal_lm(folder), []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda m, a: found.append(a[0].abs().max()))
    model(IDS)
    return max(found).item()


def test_the_excess_is_the_formula():
    torch.manual_seed(0)
    scores = [torch.randn(2, 5, 7, dtype=torch.float64) * 3 for _ in range(2)]
    counts = torch.tensor([[True] * 4, [True, False, True, False]])
    found, largest = range_excess(scores, counts, 2.0)
    expected = 0.0
    for score in scores:
        for row in range(2):
            for place in range(4):
                if counts[row, place]:
                    excess = (score[row, place].abs() / 2 - 1).clamp(min=0) ** 2
                    expected += excess.mean().item() / 2
    assert found.item() == pytest.approx(expected, rel=1e-6) and expected > 0
    seen = torch.cat([score[:, :-1][counts] for score in scores])
    assert largest.item() == pytest.approx(seen.abs().max().item(), rel=1e-6)
    assert range_excess(scores, counts, 100.0)[0] == 0


def test_products_come_within_the_bound(job, student, history, tmp_path):
    before = largest_score(student)
    bound = before / 3
    longer = job | {"tokens": 32 * 4 * 40, "log_every": 5, "save_every": 100}
    penalty = {"range_bound": bound, "range_weight": 100.0}
    out = finetune(**longer | penalty, out=tmp_path / "out")
    free = finetune(**longer, out=tmp_path / "free")
    entries = history(out)
    assert entries[-1]["range"] < 0.2 * entries[0]["range"]
    assert entries[0]["largest_score"] > 2 * bound
    assert largest_score(out) < 0.8 * largest_score(free)
    assert "range" not in history(free)[0]


def test_the_penalty_goes_through_checkpointed_layers(job, history, tmp_path):
    short = job | {"tokens": 32 * 4 * 2, "range_bound": 0.5}
    first, second = (
        history(finetune(**short | {"gradient_checkpointing": saver}, out=tmp_path / str(saver)))
        for saver in (False, True)
    )
    for ours, theirs in zip(first, second, strict=True):
        for name in ("loss", "range", "largest_score", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_compiled_layers_train_alike(job, finished, history, tmp_path):
    out = finetune(**job | {"compile": "aot_eager", "homotopy": "blend"}, out=tmp_path / "out")
    plain = finetune(**job | {"homotopy": "blend"}, out=tmp_path / "plain")
    for ours, theirs in zip(history(out), history(plain), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2, abs=1e-4)
    with pytest.raises(InputError, match="--compile is 'magic'; use one of .*inductor"):
        finetune(**job | {"compile": "magic"}, out=tmp_path / "other")
