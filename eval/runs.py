"""`bilinearize compare`: one table and one picture over finished runs.

compare([Path("runs/rank1"), Path("runs/rank2")], Path("comparison"))
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bilinearize.eval.figures import new_figure, style
from bilinearize.eval.report import SCHEMA
from bilinearize.model import tables
from bilinearize.model.card import read_json
from bilinearize.model.checkpoint import atomic_folder, check_new
from bilinearize.model.errors import InputError
from bilinearize.model.tables import format_gap, format_size

HEADER = ("run", "model", "method", "rank", "expand", "layers", "parameters", "calibrated on")
RESULTS = ("trained on", "text", "perplexity", "gap to teacher, nats", "ratio", "KL, nats", "top-1")


@dataclass(frozen=True)
class Row:
    """One model of one run. A model that was not converted has no method."""

    run: str
    model: str
    method: str | None
    rank: int | list[int] | None
    expand: int | list[int] | None
    converted_layers: int | None
    layers: int | None
    parameters: int
    calibration_tokens: int
    training_tokens: int
    text: str
    """A letter: rows with the same one were measured on the same tokens against one teacher."""
    perplexity: float | None
    gap: float
    gap_interval: list[float] | None
    ratio: float | None
    kl: float
    top1_agreement: float


def compare(runs: Sequence[Path], out: Path) -> list[Row]:
    """Write `compare.json`, `compare.md` and `compare.png` into `out`, and print the table.

    Args:
        runs: folders of finished runs, or of reports that `bilinearize eval` wrote.

    Raises:
        InputError: if one holds no report of this version; nothing is written then.
    """
    check_new(out)
    reports = {name: read_report(run) for name, run in zip(run_names(runs), runs, strict=True)}
    rows = collect(reports)
    text = format_comparison(rows, reports)
    with atomic_folder(out) as folder:
        draw(rows, folder / "compare.png")
        (folder / "compare.md").write_text(
            f"# Comparison\n\n{text}\n\n![gaps](compare.png)\n", encoding="utf-8"
        )
        content = {"schema": SCHEMA, "rows": [asdict(row) for row in rows]}
        (folder / "compare.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"{text}\nWrote {out}")
    return rows


def run_names(runs: Sequence[Path]) -> list[str]:
    """The last parts of the paths, or whole paths where those are the same."""
    names = [run.name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run) for run in runs]
    if len(set(names)) < len(names):
        raise InputError(f"{names[0]}: named twice; name each run once.")
    return names


def read_report(run: Path) -> dict:
    """The report of a run.

    Raises:
        InputError: if there is none, or one of another version.
    """
    files = [run / "eval" / "eval.json", run / "eval.json"]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise InputError(f"{run}: no eval.json in it or its eval/; name a finished run or report.")
    result = read_json(found)
    if result.get("schema") != SCHEMA:
        raise InputError(f"{found}: schema {result.get('schema')}, not {SCHEMA}; evaluate again.")
    return result


def collect(reports: dict[str, dict]) -> list[Row]:
    """The rows of all reports, in order."""
    letters: dict[tuple, str] = {}
    rows = []
    for run, result in reports.items():
        same = (result["protocol"]["tokens_sha256"], result["teacher"]["weights_sha256"])
        letter = letters.setdefault(same, chr(ord("A") + len(letters) % 26))
        for model, record in result["candidates"].items():
            made = record["origin"] or {}
            keys = ("method", "rank", "expand", "converted_layers", "layers")
            results = ("perplexity", "gap", "gap_interval", "ratio", "kl", "top1_agreement")
            rows.append(
                Row(
                    run,
                    model,
                    **{key: made.get(key) for key in keys},
                    parameters=record["parameters"],
                    calibration_tokens=made.get("calibration_tokens", 0),
                    training_tokens=made.get("training_tokens", 0),
                    text=letter,
                    **{key: record[key] for key in results},
                )
            )
    return rows


def format_comparison(rows: Sequence[Row], reports: dict[str, dict]) -> str:
    """The table, and what its letters stand for."""
    lines: list[tuple[str, ...]] = [HEADER + RESULTS]
    for row in rows:
        layers = "" if row.method is None else f"{row.converted_layers} of {row.layers}"
        made = (row.method or "not converted", *map(_list, (row.rank, row.expand)), layers)
        tokens = (f"{row.calibration_tokens:,}", f"{row.training_tokens:,}")
        lines.append(
            (
                *(row.run, row.model, *made, f"{row.parameters:,}", *tokens, row.text),
                format_size(row.perplexity),
                format_gap(row.gap, row.gap_interval),
                format_size(row.ratio, 3),
                format_size(row.kl, 4),
                f"{row.top1_agreement:.1%}",
            )
        )
    notes = {}
    for row in rows:
        facts, teacher = reports[row.run]["protocol"], reports[row.run]["teacher"]
        notes[row.text] = (
            f"{row.text}: {facts['tokens_scored']:,} tokens of {', '.join(facts['slices'])}, "
            f"protocol {facts['name']}, windows of {facts['window']}, teacher at "
            f"{format_size(teacher['perplexity'])}."
        )
    warning = "Gaps on different texts are not alike.\n\n" if len(notes) > 1 else ""
    return tables.format_table(lines) + f"\n\n{warning}" + "\n\n".join(notes.values())


def _list(value: int | list[int] | None) -> str:
    if isinstance(value, list):
        return "-".join(str(end) for end in sorted({min(value), max(value)}))
    return "" if value is None else str(value)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Each model's gap, and the gap against the tokens that it took."""
    figure, (gaps, tokens) = new_figure(13, max(4.0, 1.6 + 0.3 * len(rows)), 2)
    values = [row.gap for row in rows]
    if max(values) > 20 * min(values) > 0:  # from a finetuned model to a broken one
        gaps.set_xscale("log")
        tokens.set_yscale("log")
        for axis in (gaps.xaxis, tokens.yaxis):
            axis.set_major_formatter(lambda gap, _: f"{gap:g}")
    else:
        gaps.axvline(0, color="#000000", linewidth=0.8, linestyle=":")
    tokens.set_xscale("symlog", linthresh=1000)
    runs = list(dict.fromkeys(row.run for row in rows))
    for number, row in enumerate(rows):
        own = style(runs.index(row.run))
        ends = row.gap_interval or [row.gap, row.gap]
        gaps.plot(ends, [number] * 2, color=own["color"], linewidth=3, alpha=0.5)
        gaps.plot(row.gap, number, own["marker"], color=own["color"])
    for index, run in enumerate(runs):
        mine = [row for row in rows if row.run == run]
        mine.sort(key=lambda row: row.calibration_tokens + row.training_tokens)
        spent = [row.calibration_tokens + row.training_tokens for row in mine]
        tokens.plot(spent, [row.gap for row in mine], label=run, linewidth=1, **style(index))
    gaps.set_yticks(range(len(rows)), [f"{row.run}: {row.model} ({row.text})" for row in rows])
    gaps.set_ylim(len(rows) - 0.5, -0.5)
    gaps.set_xlabel("gap to the teacher, nats per token (bar: 95 %)")
    tokens.set(xlabel="tokens of calibration and training", ylabel="gap to the teacher, nats")
    most = max(row.calibration_tokens + row.training_tokens for row in rows)
    tokens.set_xticks([0, *(10**power for power in range(3, len(str(most)) + 1))])
    tokens.minorticks_off()
    tokens.set_xlim(-100, max(1500, 1.5 * most))
    tokens.xaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    tokens.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
