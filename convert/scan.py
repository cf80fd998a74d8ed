"""What each layer costs when it alone is converted, and which ones to leave as they are."""

import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.nn import functional
from tqdm import tqdm

from bilinearize.convert.layer import LayerConverter
from bilinearize.convert.options import make_plan, parse_size
from bilinearize.convert.run import check_tokens, read_calibration
from bilinearize.convert.source import Source
from bilinearize.convert.stream import Stream
from bilinearize.model import checkpoint
from bilinearize.model.device import choose_device
from bilinearize.model.errors import InputError


def scan(
    source: str,
    out: Path,
    *,
    text: str,
    text_column: str = "text",
    split: str = "train",
    tokens: int = 16384,
    eval_tokens: int = 4096,
    window: int = 512,
    bos: str = "auto",
    rank: int = 1,
    leave: int = 5,
    higher_rank: int | None = None,
    budget: float = 0.1,
    device: str = "auto",
    state_budget: str = "8GB",
    revision: str | None = None,
) -> dict:
    """Fit every layer on the source's own states, then measure the model with that layer replaced.

    The statistics are gathered in one pass over the text. The source is held in memory once, for
    the measurement on the `eval_tokens` that follow the calibration tokens in the text.

    Returns:
        What `scan.json` in `out` holds: the loss of the source and each layer's cost, in nats a
        token, with its standard error over windows; the layers to convert when the `leave` dearest
        are left; with `higher_rank` also each layer's cost at that rank, and ranks for all layers
        that add no more than the share `budget` to the MLPs' weights.

    Raises:
        InputError: if the source, the text or an option can't be used; nothing is written then.
    """
    checkpoint.check_new(out)
    place, state_bytes = choose_device(device), parse_size(state_budget)
    folder = checkpoint.resolve_checkpoint(source, revision)
    model = Source(folder)
    plan = make_plan(model.layers, "refit", rank, 1, None)
    ranks = [rank]
    if higher_rank is not None:
        make_plan(model.layers, "refit", higher_rank, 1, None)
        if higher_rank <= rank or budget <= 0:
            raise InputError(
                f"--higher_rank is {higher_rank} and --budget {budget}; use a rank above {rank} "
                "and a share above 0."
            )
        ranks.append(higher_rank)
    if not 0 <= leave < model.layers:
        raise InputError(f"--leave is {leave}; use 0 to {model.layers - 1}.")
    wanted = tokens // window * window + eval_tokens
    windows = read_calibration(model, text, text_column, split, wanted, window, bos)
    fitted = tokens // window
    if len(windows) - fitted < 2:
        raise InputError(
            f"{text}: {windows.numel()} tokens; --tokens and two windows to evaluate on need "
            f"{(fitted + 2) * window}."
        )
    check_tokens(model, plan, "refit", windows[:fitted])
    with checkpoint.atomic_folder(out) as partial:
        stream = Stream(model, windows[:fitted], place, state_bytes, partial)
        converter = LayerConverter("refit", torch.float32, stream)
        fits = fit_alone(model, converter, ranks)
        blocks = [[block for block, _ in fit] for fit in fits]
        result = measure(folder, blocks, windows[fitted:], place)
        for layer, fit in zip(result["layers"], fits, strict=True):
            layer["heldout_error"] = fit[0][1]
        result |= {"source": source, "rank": rank, "text": text, "tokens": fitted * window}
        result |= {"eval_tokens": windows[fitted:].numel(), "window": window}
        result["left"] = sorted(dearest(result["layers"])[:leave])
        result["convert_layers"] = spans(set(range(model.layers)) - set(result["left"]))
        if higher_rank is not None:
            result["higher_rank"] = higher_rank
            result["ranks"] = suggest_ranks(result["layers"], rank, higher_rank, budget)
        write_report(partial, result)
    return result


def fit_alone(
    model: Source, converter: LayerConverter, ranks: list[int]
) -> list[list[tuple[torch.nn.Module, float]]]:
    """Each layer's block of each rank, fitted on the source's states, and its held-out error."""
    stream = converter.stream
    assert stream is not None
    fits = []
    for index in tqdm(range(model.layers), desc="fit", unit="layer"):
        layer, _ = model.load_layer(index, stream.device)
        before, fit = stream.teacher.clone() if len(ranks) > 1 else stream.teacher, []
        for rank in ranks:
            stream.teacher.copy_(before)
            stream.student.copy_(before)
            block, record = converter(layer, rank)
            fit.append((block, record["heldout_error"]))
        fits.append(fit)
    return fits


@torch.no_grad()
def measure(
    folder: Path, blocks: list[list[Any]], windows: torch.Tensor, device: torch.device
) -> dict:
    """The loss of the source, and with each layer's block alone in its place, on the same windows.

    Where a layer has a second block, its cost is the `higher_cost`.
    """
    model: Any = checkpoint.load_causal_lm(folder)
    model.to(device)

    def losses() -> torch.Tensor:
        found = []
        for row in windows.to(device):
            logits = model(row[None, :-1]).logits[0].float()
            found.append(functional.cross_entropy(logits, row[1:]).double())
        return torch.stack(found).cpu()

    base = losses()
    records = []
    for index, tried in enumerate(tqdm(blocks, desc="measure", unit="layer")):
        layer = model.model.layers[index]
        record: dict[str, Any] = {"layer": index}
        original = layer.mlp
        for block, name in zip(tried, ("cost", "higher_cost"), strict=False):
            layer.mlp = block
            cost = losses() - base
            record[name] = cost.mean().item()
            record.setdefault("standard_error", cost.std().item() / len(cost) ** 0.5)
        layer.mlp = original
        records.append(record)
    return {"source_loss": base.mean().item(), "layers": records}


def suggest_ranks(layers: list[dict], rank: int, higher: int, budget: float) -> list[int]:
    """Ranks for all layers: the higher one where it saves most, as far as `budget` goes.

    A slot of rank r has `2 r + 1` vectors, so that a higher rank adds the same to each layer.
    """
    added = 2 * (higher - rank) / (2 * rank + 1) / len(layers)
    gains = {each["layer"]: each["cost"] - each["higher_cost"] for each in layers}
    best = sorted(gains, key=lambda layer: -gains[layer])[: int(budget / added + 1e-9)]
    raised = {layer for layer in best if gains[layer] > 0}
    return [higher if each["layer"] in raised else rank for each in layers]


def dearest(layers: list[dict]) -> list[int]:
    """Layer numbers, the one that costs most first."""
    return [each["layer"] for each in sorted(layers, key=lambda each: -each["cost"])]


def spans(layers: set[int]) -> str:
    """Layer numbers as `--layers` takes them: "0-3,5"."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][-1] + 1:
            parts[-1][1:] = [layer]
        else:
            parts.append([layer])
    return ",".join("-".join(map(str, part)) for part in parts)


def write_report(folder: Path, result: dict) -> None:
    """scan.json, scan.md and scan.png."""
    (folder / "scan.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "scan.md").write_text(format_table(result) + "\n")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    layers = result["layers"]
    colours = ["#d55e00" if each["layer"] in result["left"] else "#0072b2" for each in layers]
    axes.bar(
        [each["layer"] for each in layers],
        [each["cost"] for each in layers],
        yerr=[each["standard_error"] for each in layers],
        color=colours,
        ecolor="0.3",
    )
    axes.set_xlabel("layer converted alone (orange: suggested to be left)")
    axes.set_ylabel("cost, nats a token")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "scan.png", dpi=150)


def format_table(result: dict) -> str:
    """The costs as a Markdown table, the dearest first, and the suggestion."""
    by_number = {each["layer"]: each for each in result["layers"]}
    lines = ["| layer | cost, nats | held-out fit error |", "|---:|---:|---:|"]
    for number in dearest(result["layers"]):
        each = by_number[number]
        lines.append(
            f"| {number} | {each['cost']:+.4f} ± {each['standard_error']:.4f} "
            f"| {each['heldout_error']:.4f} |"
        )
    lines += [
        "",
        f"{result['eval_tokens']:,} tokens in windows of {result['window']}, fitted on "
        f"{result['tokens']:,}; the source's loss is {result['source_loss']:.4f} nats. "
        f"To leave the {len(result['left'])} dearest: --layers {result['convert_layers']}",
    ]
    if "ranks" in result:
        raised = sum(value == result["higher_rank"] for value in result["ranks"])
        lines.append(
            f"To give {raised} layers rank {result['higher_rank']}, where it saves most: "
            f"--rank '{result['ranks']}'"
        )
    return "\n".join(lines)
