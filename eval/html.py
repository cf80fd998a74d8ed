"""The report of an evaluation as one self-contained HTML page."""

from bilinearize.eval.figures import draw_divergence, draw_fits, draw_slices, draw_training
from bilinearize.eval.inputs import TEACHER
from bilinearize.model.page import Cell, Number, Page, Text
from bilinearize.model.tables import NOT_KNOWN, format_gap, format_size

SHOWN = 6
"""Samples on the page; `eval.json` has them all."""
HEADER = ["model", "perplexity", "gap, nats", "ratio", "KL, nats"]
HEADER += ["KL median", "KL 99 %", "KL max", "top-1", "top-5", "RMS Δp", "bits/byte"]


def format_html(result: dict, picture: bytes, protocol: str) -> str:
    """The page.

    Args:
        result: what `eval.json` holds.
        picture: `eval.png`.
        protocol: in words.
    """
    page = Page(f"Evaluation against {_short(result['teacher']['path'])}")
    page.text(protocol)
    _table(page, result)
    page.picture_png("eval", picture, "Perplexity, divergence by window and loss by position")
    _figure(page, "divergence", draw_divergence(result), "Distribution of the divergence by token")
    if len(result["slices"]) > 1:
        page.heading("By slice of text")
        _figure(page, "slices", draw_slices(result), "Gap of each candidate on each slice")
        for name, part in result["slices"].items():
            tokens = result["protocol"]["slices"][name]["tokens_scored"]
            page.heading(f"{name}, {tokens:,} tokens", 3)
            _table(page, part)
    fits, training = draw_fits(result), draw_training(result)
    if fits is not None or training is not None:
        page.heading("How the candidates were made")
        _origins(page, result)
    _figure(page, "fits", fits, "Fit error of each converted layer")
    _figure(page, "training", training, "Gap and KL against training tokens")
    if result["tasks"]:
        _tasks(page, result)
    if result["generation"]:
        _generation(page, result)
    _provenance(page, result)
    return page.to_html()


def _short(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _figure(page: Page, name: str, figure, alt: str) -> None:
    if figure is not None:
        page.picture(name, figure, alt)


def _table(page: Page, part: dict) -> None:
    rows: list[list[Cell]] = []
    for name, record in {TEACHER: part[TEACHER], **part["candidates"]}.items():
        cells = [format_size(record["perplexity"])]
        if "gap" in record:
            cells += [format_gap(record["gap"], record["gap_interval"])]
            cells += [format_size(record["ratio"], 3)]
            keys = ("kl", "kl_median", "kl_p99", "kl_max")
            cells += [format_size(record[key], 4) for key in keys]
            cells += [f"{record[key]:.1%}" for key in ("top1_agreement", "top5_agreement")]
            cells += [f"{record['probability_change_rms']:.4f}"]
        else:
            cells += [""] * 9
        bits = record["bits_per_byte"]
        cells += [NOT_KNOWN if bits is None else format_size(bits, 4)]
        if record["word_perplexity"] is not None:
            cells += [format_size(record["word_perplexity"])]
        rows.append([name, *map(Number, cells)])
    words = part[TEACHER]["word_perplexity"] is not None
    page.table([*HEADER, *(["word perplexity"] if words else [])], rows)


def _origins(page: Page, result: dict) -> None:
    rows: list[list[Cell]] = []
    for name, record in result["candidates"].items():
        made = record["origin"]
        if made is None:
            continue
        rank = made["rank"] if isinstance(made["rank"], int) else str(made["rank"])
        layers = f"{made['converted_layers']} of {made['layers']}"
        tokens = (made["calibration_tokens"], made["training_tokens"])
        rows.append([name, made["method"], rank, made["expand"], layers, *tokens])
    header = ["model", "method", "rank", "expand", "layers", "calibration tokens"]
    page.table([*header, "training tokens"], rows)


def _tasks(page: Page, result: dict) -> None:
    page.heading("Tasks")
    facts = result["protocol"]["tasks"]
    page.text(
        f"lm-evaluation-harness {facts['lm_eval']}. Differences are paired by question, with a "
        "95 % interval; gained and lost are questions that only the model or only the teacher "
        "gets right; p is of McNemar's exact test."
    )
    rows: list[list[Cell]] = []
    for task, metrics in result["tasks"].items():
        for metric, found in metrics.items():
            name = f"{task}, {metric}"
            rows.append([name, found["questions"], TEACHER, Number(f"{found[TEACHER]:.4f}")])
            rows[-1] += [""] * 4
            for model, record in found["candidates"].items():
                gap = format_gap(record["difference"], record["difference_interval"])
                p = record["mcnemar_p"]
                shown = NOT_KNOWN if p is None else f"{p:.3g}"
                rows.append([name, found["questions"], model, Number(f"{record['score']:.4f}")])
                rows[-1] += [Number(gap), record["gained"], record["lost"], Number(shown)]
    header = ["task", "questions", "model", "score", "less the teacher's", "gained", "lost", "p"]
    page.table(header, rows)


def _generation(page: Page, result: dict) -> None:
    facts = result["generation"]
    page.heading("What they write")
    page.text(
        f"Greedy continuations of {facts['prompts']} held-out prompts of {facts['prompt_tokens']} "
        f"tokens, {facts['tokens']} tokens each. The teacher's loss is in nats per token; its "
        "difference is paired by prompt, with a 95 % interval."
    )
    rows: list[list[Cell]] = []
    models = {"(held-out text)": facts["text"], TEACHER: facts[TEACHER], **facts["candidates"]}
    for name, record in models.items():
        if record is None:
            continue
        cells = [f"{record['teacher_nll']:.3f}", "", "", ""]
        if "teacher_nll_gap" in record:
            gap = format_gap(record["teacher_nll_gap"], record["teacher_nll_gap_interval"])
            first = f"{record['first_divergence_mean']:.1f}"
            cells[1:] = [gap, first, f"{record['identical']:.0%}"]
        shares = (record[key] for key in ("distinct_1", "distinct_2", "repetition_4"))
        cells += [NOT_KNOWN if share is None else f"{share:.1%}" for share in shares]
        rows.append([name, *map(Number, cells)])
    header = ["text by", "teacher's loss", "less that on its own", "tokens until it differs"]
    page.table([*header, "never differs", "distinct-1", "distinct-2", "repeated 4-grams"], rows)
    names = list(result["candidates"])
    rows = []
    for sample in result["samples"][:SHOWN]:
        texts = (sample["prompt"], sample[TEACHER], *(sample["candidates"][n] for n in names))
        rows.append([Text(text.strip("\n")) for text in texts])
    page.table(["prompt", TEACHER, *names], rows)


def _provenance(page: Page, result: dict) -> None:
    facts = result["protocol"]
    page.heading("Provenance")
    rows: list[list[Cell]] = [
        [name, record["path"], record["parameters"], record["weights_sha256"][:16]]
        for name, record in {TEACHER: result[TEACHER], **result["candidates"]}.items()
    ]
    page.table(["model", "path", "parameters", "weights, SHA-256"], rows)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    page.text(f"Tokens SHA-256 {facts['tokens_sha256']}; tokenizer {facts['tokenizer_sha256']}.")
    page.text(f"{versions}. Schema {result['schema']}.")
