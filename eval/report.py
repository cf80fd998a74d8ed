"""The report of an evaluation, `eval.json`, `eval.md`, `eval.png`: written whole or not at all."""

import json
import math
from pathlib import Path

from bilinearize.eval.plot import draw
from bilinearize.model.checkpoint import atomic_folder

SCHEMA = 1
"""Version of the layout of `eval.json`; raised when a key changes its meaning or goes away."""
HEADER = ("model", "perplexity", "gap to teacher, nats", "ratio", "KL, nats", "top-1")
NOT_KNOWN = "n/a"


def write_report(out: Path, result: dict) -> None:
    """Write the three files into the new folder `out`.

    Raises:
        InputError: if `out` exists already.
    """
    with atomic_folder(out) as folder:
        draw(result, folder / "eval.png")
        (folder / "eval.md").write_text(format_markdown(result), encoding="utf-8")
        text = json.dumps(result, indent=2, allow_nan=False, ensure_ascii=False)
        (folder / "eval.json").write_text(text + "\n", encoding="utf-8")


def format_table(result: dict) -> str:
    """The main numbers, as a Markdown table with aligned columns: also for the terminal."""
    rows = [HEADER, _teacher_row(result["teacher"])]
    rows += [_candidate_row(name, record) for name, record in result["candidates"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _teacher_row(record: dict) -> tuple[str, ...]:
    return ("teacher", format_size(record["perplexity"]), "", "", "", "")


def _candidate_row(name: str, record: dict) -> tuple[str, ...]:
    return (
        name.replace("|", r"\|"),
        format_size(record["perplexity"]),
        format_gap(record["gap"], record["gap_interval"]),
        format_size(record["ratio"], decimals=3),
        format_size(record["kl"], decimals=4),
        f"{record['top1_agreement']:.1%}",
    )


def format_size(value: float | None, decimals: int = 2) -> str:
    """A number of unknown size: 0.0123, 41.53, 412.6, 138,214."""
    if value is None:
        return "over 1e300"
    if value >= 1e9:
        return f"{value:.2e}"
    digits = 0 if value == 0 else math.floor(math.log10(abs(value))) + 1
    return f"{value:,.{max(0, min(decimals, decimals + 2 - digits))}f}"


def format_gap(gap: float, interval: list[float] | None) -> str:
    """`+0.123 [0.119, 0.127]`, with decimals enough to show the width of the interval."""
    if interval is None:
        return f"{gap:+.3f} [{NOT_KNOWN}]"
    half = (interval[1] - interval[0]) / 2
    decimals = 3 if half == 0 else min(7, max(3, 1 - math.floor(math.log10(half))))
    low, high = (f"{end:.{decimals}f}" for end in interval)
    return f"{gap:+.{decimals}f} [{low}, {high}]"


def format_protocol(result: dict) -> str:
    """One sentence or two: what was scored, and how."""
    facts = result["protocol"]
    bos = "with BOS first" if facts["bos_in_every_window"] else "without BOS"
    return (
        f"{facts['tokens_scored']:,} scored tokens of {facts['text']} in {facts['windows']:,} "
        f"windows of {facts['window']}, each {bos}; {facts['dtype']} on {facts['device']}, "
        f"{facts['attention']} attention, {facts['vocabulary']:,} logits. "
        "Gaps are paired, with 95 % intervals from a block bootstrap over windows; "
        "KL is of the teacher to the model."
    )


def format_markdown(result: dict) -> str:
    """The whole of `eval.md`."""
    facts = result["protocol"]
    parts = ["# Evaluation", format_table(result), format_protocol(result)]
    parts += ["![perplexity, divergence and loss by position](eval.png)", "## More numbers"]
    parts += [_detail_table(result)]
    if result["samples"]:
        parts.append("## Greedy continuations")
    for number, sample in enumerate(result["samples"], 1):
        parts += [f"### Prompt {number}", _quote(sample["prompt"])]
        parts += ["teacher:", _quote(sample["teacher"])]
        for name, text in sample["candidates"].items():
            shared = sample["tokens_until_divergence"][name]
            parts += [f"{name}, the first {shared} tokens as the teacher:", _quote(text)]
    parts += ["## Provenance", _provenance(result, facts)]
    return "\n\n".join(parts) + "\n"


def _detail_table(result: dict) -> str:
    lines = [
        "| model | bits per byte | KL median | KL 99 % | KL max | top-5 | RMS change in p |",
        "|---|--:|--:|--:|--:|--:|--:|",
        f"| teacher | {_bits(result['teacher'])} | | | | | |",
    ]
    for name, record in result["candidates"].items():
        divergences = (format_size(record[key], 4) for key in ("kl_median", "kl_p99", "kl_max"))
        lines.append(
            f"| {name} | {_bits(record)} | {' | '.join(divergences)} | "
            f"{record['top5_agreement']:.1%} | {record['probability_change_rms']:.4f} |"
        )
    notes = (
        "Top-5: the teacher's first choice is among the model's first five. RMS change in p: of "
        "the probability of the right token."
    )
    return "\n".join(lines) + "\n\n" + notes


def _bits(record: dict) -> str:
    bits = record["bits_per_byte"]
    return NOT_KNOWN if bits is None else format_size(bits, 4)


def _quote(text: str) -> str:
    """An indented code block: nothing in the text is taken for Markdown."""
    return "\n".join("    " + line for line in text.splitlines() or [""])


def _provenance(result: dict, facts: dict) -> str:
    paths = {"teacher": result["teacher"]["path"]}
    paths |= {name: record["path"] for name, record in result["candidates"].items()}
    lines = [f"- {name}: `{path}`" for name, path in paths.items()]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines += [
        f"- tokens: SHA-256 `{facts['tokens_sha256']}`",
        f"- tokenizer: SHA-256 `{facts['tokenizer_sha256']}`",
        f"- versions: {versions}",
    ]
    return "\n".join(lines)
