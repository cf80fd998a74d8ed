"""Tasks of lm-evaluation-harness on a local task file, and its own perplexity against ours."""

import json
import math
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from bilinearize import InputError
from bilinearize.eval.compare import evaluate
from bilinearize.eval.detokenise import detokenise_wikitext
from bilinearize.eval.report import format_tasks
from bilinearize.eval.tasks import mcnemar, pair, plan_tasks
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'bilinearize[tasks]'"
)
# The harness warns of much that is not ours: its own deprecations, seeds, caches.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_mcnemar_against_the_binomial_written_out():
    for gained, lost in ((0, 0), (1, 0), (3, 9), (9, 3), (40, 60), (700, 800)):
        total = gained + lost
        tail = sum(math.comb(total, k) for k in range(min(gained, lost) + 1))
        exact = min(1.0, 2 * tail / 2**total)
        assert mcnemar(gained, lost) == pytest.approx(exact, rel=1e-9)
    # Published example: Agresti, Categorical Data Analysis: 86 against 150 switches.
    assert mcnemar(86, 150) == pytest.approx(3.7e-5, rel=0.02)


def test_pairs_by_hand():
    teacher = {3: 1.0, 1: 1.0, 2: 0.0, 4: 0.0}
    own = {1: 0.0, 2: 1.0, 3: 0.0, 4: 0.0}
    found = pair(teacher, own, 500, 0)
    assert (found["score"], found["difference"]) == (0.25, -0.25)
    assert (found["gained"], found["lost"], found["mcnemar_p"]) == (1, 2, 1.0)
    low, high = found["difference_interval"]
    assert low < -0.25 < high
    assert pair(teacher, {**own, 1: 0.5}, 500, 0)["mcnemar_p"] is None
    same = pair(teacher, teacher, 500, 0)
    assert (same["difference_interval"], same["mcnemar_p"]) == ([0, 0], 1.0)


def test_no_tasks_need_no_harness():
    assert plan_tasks(None, None, None) is None and plan_tasks([], None, None) is None


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_the_harness_the_remedy_is_named():
    with pytest.raises(InputError, match=r"pip install 'bilinearize\[tasks\]'"):
        plan_tasks(["hellaswag"], None, None)


@pytest.fixture
def task_file(tmp_path):
    """A multiple-choice task of 40 questions."""
    generator = np.random.default_rng(0)
    words = ["tree", "house", "river", "stone", "light", "water"]
    rows = []
    for _ in range(40):
        picks = [words[pick] for pick in generator.permutation(len(words))[:3]]
        right = int(generator.integers(3))
        rows.append(
            {"question": f"the old {picks[right]} stands", "choices": picks, "label": right}
        )
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "pico_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}} and the",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    file = tmp_path / "pico_choice.yaml"
    file.write_text(yaml.safe_dump(task))
    return file, rows


@pytest.fixture
def other(pico_llama, tmp_path):
    """A model of the same shape with other random weights, which answers otherwise."""
    folder = tmp_path / "other"
    shutil.copytree(pico_llama, folder)
    torch.manual_seed(7)
    config = LlamaConfig.from_pretrained(pico_llama, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@needs_harness
def test_a_local_task(task_file, pico_llama, other, documents_file, tmp_path):
    file, rows = task_file
    result = evaluate(
        str(pico_llama),
        {"other": str(other), "copy": str(pico_llama)},
        tmp_path / "out",
        text=str(documents_file),
        window=64,
        tokens=256,
        prompts=0,
        tasks=[str(file)],
        batch_size=2,
    )
    facts = result["tasks"]["pico_choice"]["acc"]
    right = {
        name: [
            answers(load_causal_lm(folder), load_tokenizer(pico_llama), row) == row["label"]
            for row in rows
        ]
        for name, folder in (("teacher", pico_llama), ("other", other))
    }
    assert facts["questions"] == 40
    assert facts["teacher"] == pytest.approx(np.mean(right["teacher"]))
    record = facts["candidates"]["other"]
    assert record["score"] == pytest.approx(np.mean(right["other"]))
    pairs = list(zip(right["teacher"], right["other"], strict=True))
    assert record["gained"] == pairs.count((False, True))
    assert record["lost"] == pairs.count((True, False))
    assert record["gained"] + record["lost"] > 0
    assert record["mcnemar_p"] == pytest.approx(mcnemar(record["gained"], record["lost"]))
    copy = facts["candidates"]["copy"]
    assert (copy["difference"], copy["mcnemar_p"], copy["gained"]) == (0, 1, 0)
    assert result["protocol"]["tasks"]["tasks"] == ["pico_choice.yaml"]
    assert format_tasks(result) in (tmp_path / "out" / "eval.md").read_text()
    assert "<h2>Tasks</h2>" in (tmp_path / "out" / "eval.html").read_text()


def answers(model, tokenizer, row) -> int:
    """The choice with the highest log-likelihood, by a loop of its own."""
    start = tokenizer(f"{row['question']} and the").input_ids
    found = []
    for choice in row["choices"]:
        ids = tokenizer(f"{row['question']} and the {choice}").input_ids
        with torch.no_grad():
            scores = model(torch.tensor(ids)[None]).logits[0].double().log_softmax(-1)
        own = range(len(start), len(ids))
        found.append(sum(float(scores[place - 1, ids[place]]) for place in own))
    return int(np.argmax(found))


@needs_harness
def test_bad_tasks(task_file, tmp_path):
    with pytest.raises(InputError, match="none.yaml: no such task file"):
        plan_tasks([str(tmp_path / "none.yaml")], None, None)
    with pytest.raises(InputError, match="task_limit is 0"):
        plan_tasks([str(task_file[0])], 0, None)
    with pytest.raises(InputError, match="tasks no_such_task_x: can't be loaded"):
        plan_tasks(["no_such_task_x"], None, None)
    plan = plan_tasks([str(task_file[0])], 5, 0)
    assert plan.facts["limit"] == 5


@needs_harness
@pytest.mark.parametrize("context", [40, 200])
def test_perplexities_are_those_of_the_harness(context, pico_llama, half, documents_file, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    task = {
        "task": "pico_rolling",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents_file)}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
    }
    file = tmp_path / "pico_rolling.yaml"
    file.write_text(yaml.safe_dump(task))
    model = HFLM(
        pretrained=load_causal_lm(half),
        tokenizer=load_tokenizer(pico_llama),
        max_length=context,
        device="cpu",
    )
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(model=model, tasks=[str(file)], task_manager=manager, bootstrap_iters=0)
    theirs = found["results"]["pico_rolling"]
    result = evaluate(
        str(pico_llama),
        {"half": str(half)},
        tmp_path / "out",
        text=str(documents_file),
        text_column="text",
        protocol="lm-eval",
        window=context,
        prompts=0,
    )
    ours = result["candidates"]["half"]
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert ours[name] == pytest.approx(theirs[f"{name},none"], rel=1e-4), name
    # Negative control: the context matters, so agreement is no accident.
    assert abs(result["teacher"]["word_perplexity"] / ours["word_perplexity"] - 1) > 1e-3


@needs_harness
def test_wikitext_is_detokenised_as_the_harness_does():
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    text = (
        " = Robert <unk> = \n \n Robert <unk> is an English film , television and theatre actor . "
        'He had a guest @-@ starring role in " The Bill " ( 2000 ) ; the players \' own 1 @,@ 200 '
        "@.@ 5 m { a } [ b ] it 's 3 ° C N times : ! ? \n = = Career = = \n"
    )
    assert detokenise_wikitext(text) == wikitext_detokenizer({"page": text}) != text
