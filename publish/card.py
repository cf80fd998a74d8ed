"""The model card that goes to the hub: the first card, and what an evaluation measured."""

from pathlib import Path
from typing import Any

from bilinearize.model import card, tables
from bilinearize.model.errors import InputError
from bilinearize.model.tables import format_gap, format_size
from bilinearize.publish.plan import Plan

PLOT = "eval/eval.png"
METRICS = {
    "perplexity": "Perplexity",
    "gap": "Gap to the original, nats per token",
    "kl": "KL(original || this model), nats per token",
    "top1_agreement": "Top-1 agreement with the original",
}


def choose_license(plan: Plan, given: str | None) -> str:
    """The licence that is asked for, else the one carried over from the source.

    Raises:
        InputError: if neither is known.
    """
    made = plan.records.made
    found = given or made.get("license") or _source_license(made["source"])
    if not found:
        raise InputError(
            f"{card.source_name(made)}: its licence is not known; name it with --license."
        )
    return found


def _source_license(source: str) -> str | None:
    return card.read_license(Path(source)) if Path(source).is_dir() else None


def format_card(plan: Plan, repo: str, license_name: str) -> str:
    """The whole of README.md.

    Args:
        repo: where it goes, `owner/name`.
        license_name: as the hub names licences.
    """
    records, report = plan.records, plan.report
    metadata = card.metadata_of(records, license_name)
    before = None
    results = [card.UNMEASURED]
    if report is not None and plan.measured is not None:
        metadata["model-index"] = model_index(repo, report, plan.measured)
        before = report["teacher"]["parameters"]
        results = describe_results(report, plan.measured, PLOT in plan.files)
    parts = [card.format_front(metadata), f"# {repo.rpartition('/')[2]}"]
    parts += [card.describe_change(records, before), "## Results", *results]
    parts += card.describe_making(records)
    parts += ["## Loading", card.describe_loading(records, repo), "## Limits", card.LIMITS]
    parts += ["## Licence", f"`{license_name}`; the source's terms hold for what is made of it."]
    parts += ["## Citation", card.CITATIONS]
    return "\n\n".join(parts) + "\n"


def describe_results(report: dict, measured: str, plot: bool) -> list[str]:
    """The paired table, the protocol, and the plot."""
    parts = [_table(report, measured), describe_protocol(report)]
    if len(report["slices"]) > 1:
        parts.append("By slice of text:")
        parts.append(_slice_table(report, measured))
    if report["tasks"]:
        parts.append("Tasks of lm-evaluation-harness, paired by question (McNemar's exact test):")
        parts.append(_task_table(report, measured))
    if plot:
        parts.append(f"![Perplexity, divergence and loss by position]({PLOT})")
    return [*parts, "All numbers are in `eval/eval.json`."]


def _table(report: dict, measured: str) -> str:
    names = [measured, *(name for name in report["candidates"] if name != measured)]
    header = ("model", "perplexity", "gap, nats", "ratio", "KL, nats", "top-1")
    rows = [header, ("original", format_size(report["teacher"]["perplexity"]), "", "", "", "")]
    for name in names:
        record = report["candidates"][name]
        rows.append(
            (
                f"**{name} (this one)**" if name == measured else name,
                format_size(record["perplexity"]),
                format_gap(record["gap"], record["gap_interval"]),
                format_size(record["ratio"], 3),
                format_size(record["kl"], 4),
                f"{record['top1_agreement']:.1%}",
            )
        )
    return tables.format_table(rows)


def _slice_table(report: dict, measured: str) -> str:
    rows = [("slice", "tokens", "original", "this one", "gap, nats", "KL, nats", "top-1")]
    for name, part in report["slices"].items():
        record = part["candidates"][measured]
        rows.append(
            (
                name,
                f"{report['protocol']['slices'][name]['tokens_scored']:,}",
                format_size(part["teacher"]["perplexity"]),
                format_size(record["perplexity"]),
                format_gap(record["gap"], record["gap_interval"]),
                format_size(record["kl"], 4),
                f"{record['top1_agreement']:.1%}",
            )
        )
    return tables.format_table(rows)


def _task_table(report: dict, measured: str) -> str:
    rows = [("task", "questions", "original", "this one", "difference", "p")]
    for task, metrics in report["tasks"].items():
        for metric, facts in metrics.items():
            record = facts["candidates"][measured]
            p = record["mcnemar_p"]
            rows.append(
                (
                    f"{task}, {metric}",
                    f"{facts['questions']:,}",
                    f"{facts['teacher']:.4f}",
                    f"{record['score']:.4f}",
                    format_gap(record["difference"], record["difference_interval"]),
                    tables.NOT_KNOWN if p is None else f"{p:.3g}",
                )
            )
    return tables.format_table(rows)


def describe_protocol(report: dict) -> str:
    """What was scored, and how."""
    facts = report["protocol"]
    texts = ", ".join(f"`{_text_name(part['text'])}`" for part in facts["slices"].values())
    return (
        f"The same {facts['tokens_scored']:,} tokens of {texts} through all models: protocol "
        f"`{facts['name']}`, {facts['windows']:,} windows of {facts['window']}, {facts['dtype']}, "
        f"bilinearize {facts['versions']['bilinearize']}. Gaps are paired, with 95 % intervals "
        f"from a bootstrap over {facts['interval']['unit']}s; KL is of the original to the model."
    )


def _text_name(text: str) -> str:
    return text if card.is_hub_id(text) else Path(text).name


def model_index(repo: str, report: dict, measured: str) -> list[dict[str, Any]]:
    """The results as the hub's metadata, one entry for each slice of text."""
    results = []
    for name, part in report["slices"].items():
        text = report["protocol"]["slices"][name]["text"]
        source, _, config = text.partition(":")
        named = card.is_hub_id(source)
        dataset = {"type": source if named else "text", "name": name}
        if named:
            dataset |= {"split": report["protocol"]["slices"][name]["split"]}
            dataset |= {"config": config} if config else {}
        record = part["candidates"][measured]
        metrics = [
            {"type": key, "value": record[key], "name": label, "verified": False}
            for key, label in METRICS.items()
            if record[key] is not None
        ]
        task = {"type": "text-generation", "name": "Text generation"}
        results.append({"task": task, "dataset": dataset, "metrics": metrics})
    return [{"name": repo.rpartition("/")[2], "results": results}]
