"""Tasks of lm-evaluation-harness, answered by all models and compared question by question.

Two accuracies on the same questions are paired: what counts are the questions that only one of two
models gets right. Needs the extra `tasks` (package lm-eval).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bilinearize.eval.inputs import TEACHER, Setup
from bilinearize.eval.processes import gather, team
from bilinearize.eval.statistics import bootstrap_intervals
from bilinearize.model.errors import InputError

Answers = dict[tuple[str, str], dict[int, float]]
"""(task, metric) to question number to score."""


@dataclass(frozen=True)
class TaskPlan:
    """Which tasks, and how."""

    names: list[str]
    manager: Any
    limit: int | None
    fewshot: int | None

    @property
    def facts(self) -> dict:
        """As it stands in `eval.json`."""
        return {
            "tasks": [Path(name).name if Path(name).is_file() else name for name in self.names],
            "limit": self.limit,
            "fewshot": self.fewshot,
            "lm_eval": version("lm-eval"),
        }


def plan_tasks(
    names: Sequence[str] | None, limit: int | None, fewshot: int | None
) -> TaskPlan | None:
    """Find the tasks, before anything is computed; None if there are to be none.

    Args:
        names: names of lm-evaluation-harness's, or YAML files of one's own.
        limit: questions per task, the first ones.
        fewshot: solved examples before each question; None as the task says.

    Raises:
        InputError: without lm-eval, or for a task that it can't load.
    """
    if not names:
        return None
    if find_spec("lm_eval") is None:
        raise InputError("tasks need lm-evaluation-harness: pip install 'bilinearize[tasks]'.")
    for key, value, low in (("task_limit", limit, 1), ("task_fewshot", fewshot, 0)):
        if value is not None and value < low:
            raise InputError(f"{key} is {value}; use {low} or more.")
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    for file in files:
        if not Path(file).is_file():
            raise InputError(f"{file}: no such task file.")
    manager = TaskManager(include_defaults=len(files) < len(names))
    try:
        manager.load(list(names))
    except Exception as error:  # of many kinds: unknown name, bad YAML, no data
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"tasks {', '.join(names)}: can't be loaded: {reason}") from error
    return TaskPlan(list(names), manager, limit, fewshot)


def compare_tasks(plan: TaskPlan, setup: Setup, batch_size: int, samples: int, seed: int) -> dict:
    """All models' scores and their paired differences, as `tasks` of `eval.json`.

    Processes share the models. Intervals are bootstrapped over questions.

    Raises:
        InputError: if a task scores no single questions.
    """
    names, state = list(setup.models), team()
    own = {
        name: answer(plan, setup, name, batch_size)
        for name in names[state.process_index :: state.num_processes]
    }
    answers = {name: each for part in gather(own) for name, each in part.items()}
    teacher = answers[TEACHER]
    if not teacher:
        raise InputError(
            f"tasks {', '.join(plan.names)}: they score no single questions; for perplexity "
            "use --protocol lm-eval."
        )
    result: dict[str, dict] = {}
    for (task, metric), scores in teacher.items():
        result.setdefault(task, {})[metric] = {
            "questions": len(scores),
            TEACHER: float(np.mean(list(scores.values()))),
            "candidates": {
                name: pair(scores, answers[name][task, metric], samples, seed)
                for name in setup.students
            },
        }
    return result


def answer(plan: TaskPlan, setup: Setup, name: str, batch_size: int) -> Answers:
    """One model's score of each question."""
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    model = setup.models[name]
    wrapped = HFLM(
        pretrained=model,
        tokenizer=setup.tokenizer,
        backend="causal",
        batch_size=batch_size,
        device=str(model.device),
    )
    found: Any = simple_evaluate(
        model=wrapped,
        tasks=list(plan.names),
        num_fewshot=plan.fewshot,
        limit=plan.limit,
        bootstrap_iters=0,
        log_samples=True,
        task_manager=plan.manager,
    )
    answers: Answers = {}
    for task, questions in found["samples"].items():
        first = questions[0]["filter"]
        for question in questions:
            if question["filter"] != first:
                continue
            for metric in question["metrics"]:
                score = question[metric]
                if isinstance(score, bool | int | float | np.number):
                    answers.setdefault((task, metric), {})[question["doc_id"]] = float(score)
    return answers


def pair(teacher: Mapping[int, float], own: Mapping[int, float], samples: int, seed: int) -> dict:
    """A model's mean score, and its difference to the teacher's on the same questions.

    McNemar's exact test takes part where every score is 0 or 1.
    """
    numbers = sorted(teacher)
    before = np.array([teacher[number] for number in numbers])
    after = np.array([own[number] for number in numbers])
    difference = (after - before)[:, None]
    estimate = bootstrap_intervals(difference, np.ones(len(numbers)), samples, seed, False)
    right = bool(np.isin([before, after], (0, 1)).all())
    gained, lost = int((after > before).sum()), int((after < before).sum())
    return {
        "score": float(after.mean()),
        "difference": float(difference.mean()),
        "difference_interval": estimate.interval(0),
        "gained": gained,
        "lost": lost,
        "mcnemar_p": mcnemar(gained, lost) if right else None,
    }


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value that questions are gained and lost with equal chance (1947).

    Only the questions that one of the two models gets right count: their number is binomial.
    """
    total, least = gained + lost, min(gained, lost)
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        for k in range(least + 1)
    ]
    tail = math.fsum(math.exp(each - total * math.log(2)) for each in logs)
    return min(1.0, 2 * tail)
