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
        are left.

    Raises:
        InputError: if the source, the text or an option can't be used; nothing is written then.
    """
    checkpoint.check_new(out)
    place, budget = choose_device(device), parse_size(state_budget)
    folder = checkpoint.resolve_checkpoint(source, revision)
    model = Source(folder)
    plan = make_plan(model.layers, "refit", rank, 1, None)
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
        stream = Stream(model, windows[:fitted], place, budget, partial)
        blocks, errors = fit_alone(model, LayerConverter("refit", torch.float32, stream), rank)
        result = measure(folder, blocks, windows[fitted:], place)
        for layer, error in zip(result["layers"], errors, strict=True):
            layer["heldout_error"] = error
        result |= {"source": source, "rank": rank, "text": text, "tokens": fitted * window}
        result |= {"eval_tokens": windows[fitted:].numel(), "window": window}
        result["left"] = sorted(dearest(result["layers"])[:leave])
        result["convert_layers"] = spans(set(range(model.layers)) - set(result["left"]))
        write_report(partial, result)
    return result


def fit_alone(
    model: Source, converter: LayerConverter, rank: int
) -> tuple[list[torch.nn.Module], list[float]]:
    """Each layer's block fitted on the source's own states, and its held-out error."""
    stream = converter.stream
    assert stream is not None
    blocks, errors = [], []
    for index in tqdm(range(model.layers), desc="fit", unit="layer"):
        layer, _ = model.load_layer(index, stream.device)
        stream.student.copy_(stream.teacher)
        block, record = converter(layer, rank)
        blocks.append(block)
        errors.append(record["heldout_error"])
    return blocks, errors


@torch.no_grad()
def measure(folder: Path, blocks: list, windows: torch.Tensor, device: torch.device) -> dict:
    """The loss of the source, and with each block alone in its place, over the same windows."""
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
    for index, block in enumerate(tqdm(blocks, desc="measure", unit="layer")):
        layer = model.model.layers[index]
        original, layer.mlp = layer.mlp, block
        cost = losses() - base
        layer.mlp = original
        error = cost.std().item() / len(cost) ** 0.5
        records.append({"layer": index, "cost": cost.mean().item(), "standard_error": error})
    return {"source_loss": base.mean().item(), "layers": records}


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
    return "\n".join(lines)
