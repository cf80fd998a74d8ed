"""The numbers of an evaluation against direct float64 computations."""

import math

import numpy as np
import pytest
import torch

from bilinearize import BilinearLlamaForCausalLM
from bilinearize.eval.compare import evaluate
from bilinearize.model.checkpoint import load_tokenizer


def perplexity_loop(logits: torch.Tensor, windows: torch.Tensor, shift: int = 1) -> float:
    """An independent perplexity, token by token in float64."""
    loss, count = 0.0, 0
    for row, ids in zip(logits, windows.tolist(), strict=True):
        for position in range(len(ids) - shift):
            scores = row[position].numpy()
            loss += np.log(np.exp(scores - scores.max()).sum()) + scores.max()
            loss -= scores[ids[position + shift]]
            count += 1
    return math.exp(loss / count)


def test_perplexity_is_that_of_an_independent_loop(report, logits, windows):
    result, _ = report
    direct = {name: perplexity_loop(logits[name], windows) for name in logits}
    assert result["teacher"]["perplexity"] == pytest.approx(direct["teacher"], rel=1e-6)
    record = result["candidates"]["half"]
    assert record["perplexity"] == pytest.approx(direct["half"], rel=1e-6)
    assert record["ratio"] == pytest.approx(direct["half"] / direct["teacher"], rel=2e-6)
    assert record["gap"] == pytest.approx(math.log(record["ratio"]), abs=1e-12)


def test_a_shift_by_one_is_another_perplexity(report, logits, windows):
    # Negative control: the comparison above would see the commonest mistake.
    wrong = perplexity_loop(logits["teacher"], windows, shift=2)
    assert abs(wrong / report[0]["teacher"]["perplexity"] - 1) > 1e-3


def test_divergence_and_agreement_are_those_of_a_direct_computation(report, logits, windows):
    record = report[0]["candidates"]["half"]
    teacher = logits["teacher"][:, :-1].log_softmax(-1)
    student = logits["half"][:, :-1].log_softmax(-1)
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    assert record["kl"] == pytest.approx(float(kl.mean()), rel=1e-6)
    assert record["kl_median"] == pytest.approx(float(kl.median()), rel=1e-3)
    assert record["kl_p99"] == pytest.approx(float(kl.flatten().quantile(0.99)), rel=1e-5)
    assert record["kl_max"] == pytest.approx(float(kl.max()), rel=1e-5)
    choice = teacher.argmax(-1)
    agree = (choice == student.argmax(-1)).double().mean()
    assert record["top1_agreement"] == pytest.approx(float(agree), abs=1e-12)
    among = (student.topk(5).indices == choice[..., None]).any(-1).double().mean()
    assert record["top5_agreement"] == pytest.approx(float(among), abs=1e-12)
    right = windows[:, 1:, None]
    change = student.gather(-1, right).exp() - teacher.gather(-1, right).exp()
    rms = float(change.square().mean().sqrt())
    assert record["probability_change_rms"] == pytest.approx(rms, rel=1e-5)
    assert 0 < record["kl_median"] < record["kl_p99"] < record["kl_max"]
    assert record["top1_agreement"] < record["top5_agreement"] < 1


def test_loss_by_position_and_by_window(report, logits, windows):
    result, _ = report
    nll = -logits["half"][:, :-1].log_softmax(-1).gather(-1, windows[:, 1:, None])[..., 0]
    by_position = result["candidates"]["half"]["nll_by_position"]
    assert by_position == pytest.approx(nll.mean(0).tolist(), rel=1e-5)
    assert result["windows"]["documents"]["nll"]["half"] == pytest.approx(
        nll.sum(1).tolist(), rel=1e-6
    )
    assert result["windows"]["documents"]["kl"]["copy"] == [0.0] * len(windows)


def test_bits_per_byte_follow_from_the_text(report, pico_llama, windows):
    result, _ = report
    # The pico tokenizer is byte-level: each character of a token stands for one byte.
    tokenizer = load_tokenizer(pico_llama)
    names = tokenizer.convert_ids_to_tokens(windows[:, 1:].flatten().tolist())
    length = sum(len(name) for name in names if name != tokenizer.eos_token)
    bits = sum(result["windows"]["documents"]["nll"]["teacher"]) / math.log(2) / length
    assert result["teacher"]["bits_per_byte"] == pytest.approx(bits, rel=1e-9)


def test_a_model_against_itself_differs_by_exactly_nothing(report):
    record = report[0]["candidates"]["copy"]
    assert record["gap"] == 0 and record["gap_interval"] == [0, 0]
    assert record["ratio"] == 1 and record["ratio_interval"] == [1, 1]
    assert all(record[key] == 0 for key in ("kl", "kl_median", "kl_p99", "kl_max"))
    assert record["kl_interval"] == [0, 0] and record["probability_change_rms"] == 0
    assert record["top1_agreement"] == record["top5_agreement"] == 1


def test_the_paired_interval_is_narrower_than_the_unpaired(report):
    result, _ = report
    spread = 0.0
    for record in (result["teacher"], result["candidates"]["half"]):
        low, high = record["nll_interval"]
        spread += (high - low) ** 2
    low, high = result["candidates"]["half"]["gap_interval"]
    assert low < result["candidates"]["half"]["gap"] < high
    assert high - low < 0.8 * math.sqrt(spread)


@pytest.mark.parametrize("batch_size", [3, 1000])
def test_batch_size_changes_nothing(batch_size, report, pico_llama, half, documents_file, tmp_path):
    result = evaluate(
        str(pico_llama),
        {"half": str(half)},
        tmp_path / "out",
        text=str(documents_file),
        window=64,
        batch_size=batch_size,
        prompts=0,
    )
    alone, before = result["candidates"]["half"], report[0]["candidates"]["half"]
    for key in ("perplexity", "gap", "kl", "kl_p99", "probability_change_rms"):
        assert alone[key] == pytest.approx(before[key], rel=1e-6), key
    assert alone["gap_interval"] == pytest.approx(before["gap_interval"], rel=1e-6)
    assert result["samples"] == []


def test_only_whole_windows_are_scored(pico_llama, half, documents_file, windows, tmp_path):
    result = evaluate(
        str(pico_llama),
        {"half": str(half)},
        tmp_path / "out",
        text=str(documents_file),
        window=64,
        tokens=5 * 64 + 63,
        prompts=0,
    )
    facts = result["protocol"]
    assert (facts["windows"], facts["tokens_scored"]) == (5, 5 * 63)
    assert len(result["windows"]["documents"]["nll"]["teacher"]) == 5


def test_bfloat16_is_what_it_says(report, pico_llama, documents_file, tmp_path):
    result = evaluate(
        str(pico_llama),
        {"copy": str(pico_llama)},
        tmp_path / "out",
        text=str(documents_file),
        window=64,
        dtype="bfloat16",
        prompts=0,
    )
    exact, rough = report[0]["teacher"]["nll"], result["teacher"]["nll"]
    assert exact != rough == pytest.approx(exact, rel=0.05)
    assert result["candidates"]["copy"]["gap"] == 0


def test_one_window_has_no_interval(pico_llama, half, documents_file, tmp_path):
    result = evaluate(
        str(pico_llama),
        {"half": str(half)},
        tmp_path / "out",
        text=str(documents_file),
        window=64,
        tokens=64,
        prompts=1,
        sample_tokens=2,
    )
    record = result["candidates"]["half"]
    assert record["gap_interval"] is record["ratio_interval"] is record["kl_interval"] is None
    assert "[n/a]" in (tmp_path / "out" / "eval.md").read_text()


def test_a_padded_vocabulary_is_cut(report, pico_llama, half, documents_file, tmp_path):
    student = BilinearLlamaForCausalLM.from_pretrained(half)
    student.resize_token_embeddings(student.config.vocab_size + 20)
    student.save_pretrained(tmp_path / "padded")
    for file in half.glob("tokenizer*"):
        (tmp_path / "padded" / file.name).write_bytes(file.read_bytes())
    result = evaluate(
        str(pico_llama),
        {"padded": str(tmp_path / "padded")},
        tmp_path / "out",
        text=str(documents_file),
        window=64,
        prompts=0,
    )
    assert result["protocol"]["vocabulary"] == 300
    padded, plain = result["candidates"]["padded"], report[0]["candidates"]["half"]
    assert padded["kl"] == pytest.approx(plain["kl"], rel=1e-6)
    assert padded["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-6)
