"""The report of an evaluation, written whole or not at all.

`eval.json`, `eval.md`, `eval.png`, and `eval.html`, which holds all in one page.
"""

import json
from pathlib import Path

from bilinearize.eval.html import format_html
from bilinearize.eval.plot import draw
from bilinearize.model import tables
from bilinearize.model.checkpoint import atomic_folder
from bilinearize.model.tables import format_gap, format_size

SCHEMA = 2
"""Version of the layout of `eval.json` (docs/eval.md); raised when a key changes its meaning."""
SHOWN = 3
"""Samples that `eval.md` shows; `eval.json` has them all."""
HEADER = ("model", "perplexity", "gap to teacher, nats", "ratio", "KL, nats", "top-1")


def write_report(out: Path, result: dict) -> None:
    """Write the four files into the new folder `out`.

    Raises:
        InputError: if `out` exists already.
    """
    with atomic_folder(out) as folder:
        draw(result, folder / "eval.png")
        page = format_html(result, (folder / "eval.png").read_bytes(), format_protocol(result))
        (folder / "eval.html").write_text(page, encoding="utf-8")
        (folder / "eval.md").write_text(format_markdown(result), encoding="utf-8")
        text = json.dumps(result, indent=2, allow_nan=False, ensure_ascii=False)
        (folder / "eval.json").write_text(text + "\n", encoding="utf-8")


def format_table(result: dict) -> str:
    """The main numbers over all slices: also for the terminal.

    Args:
        result: what `eval.json` holds, or one entry of its `slices`.
    """
    rows = [HEADER, ("teacher", format_size(result["teacher"]["perplexity"]), "", "", "", "")]
    rows += [_candidate_row(name, record) for name, record in result["candidates"].items()]
    return tables.format_table(rows)


def _candidate_row(name: str, record: dict) -> tuple[str, ...]:
    return (
        name,
        format_size(record["perplexity"]),
        format_gap(record["gap"], record["gap_interval"]),
        format_size(record["ratio"], decimals=3),
        format_size(record["kl"], decimals=4),
        f"{record['top1_agreement']:.1%}",
    )


def format_protocol(result: dict) -> str:
    """One sentence or two: what was scored, and how."""
    facts = result["protocol"]
    slices = facts["slices"]
    text = ", ".join(
        part["text"] if len(slices) == 1 else f"{name} ({part['text']})"
        for name, part in slices.items()
    )
    stride = "" if facts["stride"] == facts["window"] else f", one every {facts['stride']} tokens"
    return (
        f"{facts['tokens_scored']:,} scored tokens of {text} in {facts['windows']:,} "
        f"windows of {facts['window']}{stride}, {_first_token(facts)}; {facts['dtype']} on "
        f"{facts['device']}, {facts['attention']} attention, {facts['vocabulary']:,} logits. "
        f"Gaps are paired, with 95 % intervals from a bootstrap over {facts['interval']['unit']}s; "
        "KL is of the teacher to the model."
    )


def _first_token(facts: dict) -> str:
    if facts["name"] == "windows":
        return "each with BOS first" if facts["bos_in_every_window"] else "each without BOS"
    return f"protocol {facts['name']}"


def format_markdown(result: dict) -> str:
    """The whole of `eval.md`."""
    parts = ["# Evaluation", format_table(result), format_protocol(result)]
    parts += ["![perplexity, divergence and loss by position](eval.png)"]
    if len(result["slices"]) > 1:
        parts.append("## By slice of text")
        for name, part in result["slices"].items():
            tokens = result["protocol"]["slices"][name]["tokens_scored"]
            parts += [f"### {name}, {tokens:,} tokens", format_table(part)]
    parts += ["## More numbers", _detail_table(result)]
    if result["tasks"]:
        parts += ["## Tasks", format_tasks(result)]
    if result["generation"]:
        parts += ["## Greedy continuations", format_generation(result["generation"])]
    for number, sample in enumerate(result["samples"][:SHOWN], 1):
        parts += [f"### Prompt {number}", _quote(sample["prompt"])]
        parts += ["teacher:", _quote(sample["teacher"])]
        for name, text in sample["candidates"].items():
            shared = sample["tokens_until_divergence"][name]
            parts += [f"{name}, the first {shared} tokens as the teacher:", _quote(text)]
    parts += ["## Provenance", _provenance(result)]
    return "\n\n".join(parts) + "\n"


def _detail_table(result: dict) -> str:
    header = ("model", "bits per byte", "word perplexity", "KL median", "KL 99 %", "KL max")
    rows: list[tuple[str, ...]] = [(*header, "top-5", "RMS change in p")]
    rows.append(("teacher", *_per_text(result["teacher"]), "", "", "", "", ""))
    for name, record in result["candidates"].items():
        divergences = (format_size(record[key], 4) for key in ("kl_median", "kl_p99", "kl_max"))
        agreement = f"{record['top5_agreement']:.1%}"
        change = f"{record['probability_change_rms']:.4f}"
        rows.append((name, *_per_text(record), *divergences, agreement, change))
    notes = (
        "Top-5: the teacher's first choice is among the model's first five. RMS change in p: of "
        "the probability of the right token. Word perplexity needs whole documents: protocol "
        "`lm-eval`."
    )
    return tables.format_table(rows) + "\n\n" + notes


def format_tasks(result: dict) -> str:
    """Scores on tasks, and their paired differences."""
    header = ("task", "model", "score", "less the teacher's", "gained, lost", "p, McNemar")
    rows: list[tuple[str, ...]] = [header]
    for task, metrics in result["tasks"].items():
        for metric, facts in metrics.items():
            name = f"{task}, {metric} ({facts['questions']:,})"
            rows.append((name, "teacher", f"{facts['teacher']:.4f}", "", "", ""))
            for model, record in facts["candidates"].items():
                p = record["mcnemar_p"]
                rows.append(
                    (
                        *(name, model, f"{record['score']:.4f}"),
                        format_gap(record["difference"], record["difference_interval"]),
                        f"{record['gained']}, {record['lost']}",
                        tables.NOT_KNOWN if p is None else f"{p:.3g}",
                    )
                )
    facts = result["protocol"]["tasks"]
    notes = (
        f"lm-evaluation-harness {facts['lm_eval']}. Differences are paired by question, with 95 % "
        "intervals; gained and lost are questions that only the model or only the teacher gets "
        "right, and p is of McNemar's exact test."
    )
    return tables.format_table(rows) + "\n\n" + notes


def format_generation(facts: dict) -> str:
    """What the models wrote, in numbers: a table and what its columns mean."""
    header = ("text by", "teacher's loss", "less its loss on its own", "first differs after")
    rows: list[tuple[str, ...]] = [(*header, "distinct-1", "distinct-2", "repeated 4-grams")]
    models = {"(held-out text)": facts["text"], "teacher": facts["teacher"], **facts["candidates"]}
    for name, record in models.items():
        if record is None:
            continue
        paired = ("", "")
        if "teacher_nll_gap" in record:
            gap = format_gap(record["teacher_nll_gap"], record["teacher_nll_gap_interval"])
            mean = record["first_divergence_mean"]
            paired = (gap, f"{mean:.1f} tokens, never in {record['identical']:.0%}")
        shares = (record[key] for key in ("distinct_1", "distinct_2", "repetition_4"))
        written = (tables.NOT_KNOWN if share is None else f"{share:.1%}" for share in shares)
        rows.append((name, f"{record['teacher_nll']:.3f}", *paired, *written))
    notes = (
        f"{facts['prompts']} prompts of {facts['prompt_tokens']} tokens, {facts['tokens']} tokens "
        "after each. Losses are nats per token. Distinct-n: different n-grams over all. Repeated: "
        "4-grams that the same continuation had before."
    )
    return tables.format_table(rows) + "\n\n" + notes


def _per_text(record: dict) -> tuple[str, str]:
    bits, words = record["bits_per_byte"], record["word_perplexity"]
    return (
        tables.NOT_KNOWN if bits is None else format_size(bits, 4),
        tables.NOT_KNOWN if words is None else format_size(words),
    )


def _quote(text: str) -> str:
    """An indented code block: nothing in the text is taken for Markdown."""
    return "\n".join("    " + line for line in text.splitlines() or [""])


def _provenance(result: dict) -> str:
    facts = result["protocol"]
    models = {"teacher": result["teacher"], **result["candidates"]}
    lines = [
        f"- {name}: `{record['path']}`, weights SHA-256 `{record['weights_sha256']}`"
        for name, record in models.items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines += [
        f"- tokens: SHA-256 `{facts['tokens_sha256']}`",
        f"- tokenizer: SHA-256 `{facts['tokenizer_sha256']}`",
        f"- versions: {versions}",
    ]
    return "\n".join(lines)
