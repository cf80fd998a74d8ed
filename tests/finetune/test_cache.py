"""A teacher computed once and kept on disk."""

import json
import shutil

import pytest
import torch
from torch import nn

from bilinearize.finetune.losses import LossWeights, TopTokens, loss_sums
from bilinearize.finetune.run import finetune
from bilinearize.model.errors import InputError


def case(top_k, heat=1.0):
    """Hidden states, heads and labels of 23 tokens, and the teacher's likeliest tokens."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    heads = [nn.Linear(8, 101, bias=False).double() for _ in range(2)]
    for head in heads:
        head.weight.data = draw(101, 8)
    hidden, theirs = draw(23, 8).requires_grad_(), draw(23, 8)
    labels = torch.randint(0, 101, (23,), generator=generator)
    with torch.no_grad():
        logits = heads[1](theirs)
        values, tokens = (logits / heat).log_softmax(-1).topk(top_k)
        of_labels = logits.log_softmax(-1)[torch.arange(23), labels]
    return hidden, heads, labels, theirs, TopTokens(values, tokens, of_labels)


@pytest.mark.parametrize("heat", [1.0, 2.0])
def test_all_tokens_kept_give_the_whole_kl(heat):
    hidden, (head, their_head), labels, theirs, top = case(101, heat)
    weights = LossWeights(0.7, 0.3, heat)
    whole, parts = loss_sums(hidden, head, labels, theirs, their_head, weights, 7)
    kept, same = loss_sums(hidden, head, labels, None, None, weights, 7, top)
    assert torch.allclose(whole, kept, rtol=1e-9) and torch.allclose(parts, same, rtol=1e-9)
    (first,) = torch.autograd.grad(whole, hidden)
    (second,) = torch.autograd.grad(kept, hidden)
    assert torch.allclose(first, second, rtol=1e-6, atol=1e-9)


def test_few_tokens_give_the_kl_of_k_and_all_others():
    hidden, (head, their_head), labels, theirs, top = case(5)
    weights = LossWeights(1, 0, 1)
    found, parts = loss_sums(hidden, head, labels, None, None, weights, 7, top)
    whole, _ = loss_sums(hidden, head, labels, theirs, their_head, weights, 7)
    expected = 0.0
    for row in range(23):
        p = their_head(theirs)[row].softmax(-1)
        q = head(hidden)[row].softmax(-1)
        kept = top.tokens[row]
        both = [torch.cat([x[kept], 1 - x[kept].sum()[None]]) for x in (p, q)]
        expected += (both[0] * (both[0] / both[1]).log()).sum().item()
    assert found.item() == pytest.approx(expected, rel=1e-9)
    assert 0 < found < whole
    without_rest = (
        top.values.exp() * (top.values - head(hidden).log_softmax(-1).gather(1, top.tokens))
    ).sum()
    assert without_rest.item() != pytest.approx(expected, rel=1e-3)


@pytest.fixture(scope="module")
def cached(job, documents_file, tmp_path_factory):
    """A finetune with all 300 tokens kept, its settings and the cache."""
    folder = tmp_path_factory.mktemp("cached")
    run = job | {"teacher_mode": "cached", "top_k": 300, "teacher_cache": str(folder / "cache")}
    run |= {"heldout_text": str(documents_file), "heldout_tokens": 320, "eval_every": 6}
    return run, finetune(**run, out=folder / "out"), folder / "cache"


def test_a_cached_teacher_teaches_as_the_teacher_does(cached, job, history, tmp_path):
    run, out, _ = cached
    live = {k: v for k, v in run.items() if k not in ("teacher_mode", "top_k", "teacher_cache")}
    other = finetune(**live, out=tmp_path / "live")
    assert json.loads((out / "finetune.json").read_text())["teacher"] == "cached"
    for ours, theirs in zip(history(out), history(other), strict=True):
        for name in ours.keys() & {"kl", "gap", "loss", "heldout_kl", "heldout_gap"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-2, abs=1e-3)


def test_the_cache_serves_another_run_and_only_the_same_text(cached, text_file, history, tmp_path):
    run, out, cache = cached
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    again = finetune(**run, out=tmp_path / "again")
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == before
    assert history(again)[-1]["heldout_loss"] == history(out)[-1]["heldout_loss"]
    text = tmp_path / "other.txt"
    text.write_text(text_file.read_text()[500:])
    for change, named in (
        ({"text": str(text)}, "data_sha256"),
        ({"top_k": 20}, "top_k 300, not 20"),
        ({"temperature": 2.0}, "temperature 1.0, not 2.0"),
    ):
        with pytest.raises(InputError, match=f"cached with {named}.*another --teacher_cache"):
            finetune(**run | change, out=tmp_path / "out")
        shutil.rmtree(tmp_path / "out.work")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"loss": "hidden"}, "no layers to match"),
        ({"stages": [{"tokens": 512}, {"tokens": 512, "temperature": 2.0}]}, "one temperature"),
        ({"top_k": 301}, "--top_k 301 is more than the vocabulary"),
    ],
)
def test_what_a_cache_can_not_do_is_one_line(job, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        finetune(**job | {"teacher_mode": "cached"} | changes, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
