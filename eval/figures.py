"""The pictures of `eval.html` beside that of `eval.png`. No global state of matplotlib is used."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bilinearize.eval.plot import COLOURS, MARKERS


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side, in the style of the report."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25, linewidth=0.6)
        one.set_axisbelow(True)
    return figure, axes


def style(index: int) -> dict:
    """Colour and marker of a candidate, the same in all pictures."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def draw_divergence(result: dict) -> Figure | None:
    """The distribution over tokens of KL(teacher || candidate); None if all are exactly 0."""
    edges = np.array(result["kl_histogram_edges"])
    centres = np.sqrt(edges[:-1] * edges[1:])
    figure, (share, above) = new_figure(11, 3.8, 2)
    low, high = len(centres), 0
    for index, (name, record) in enumerate(result["candidates"].items()):
        counts = np.array(record["kl_histogram"], dtype=float)
        if record["kl_max"] == 0:
            continue
        shares = counts / counts.sum()
        own = style(index)
        share.plot(centres, shares, color=own["color"], label=name, drawstyle="steps-mid")
        share.fill_between(centres, shares, step="mid", color=own["color"], alpha=0.12)
        share.axvline(max(record["kl_median"], edges[0]), color=own["color"], lw=0.9, ls=":")
        tail = counts[::-1].cumsum()[::-1] / counts.sum()
        above.plot(edges[:-1][tail > 0], tail[tail > 0], color=own["color"], label=name)
        filled = counts.nonzero()[0]
        low, high = min(low, filled[0]), max(high, filled[-1])
    if low > high:
        return None
    for axes in (share, above):
        axes.set_xscale("log")
        axes.set_xlim(edges[low], edges[high + 1])
        axes.set_xlabel("KL to the teacher of one token, nats")
    share.set(ylabel="share of tokens", ylim=(0, None))
    share.set_title("Divergence by token (dotted: median)", fontsize=10)
    above.set(ylabel="share of tokens above", yscale="log")
    above.set_title("Tail", fontsize=10)
    share.legend(fontsize=8, frameon=False)
    return figure


def draw_slices(result: dict) -> Figure:
    """Each candidate's gap on each slice, with its interval."""
    slices, names = result["slices"], list(result["candidates"])
    figure, (axes,) = new_figure(11, 1.3 + 0.28 * len(slices) * (len(names) + 1))
    for index, name in enumerate(names):
        own = style(index)
        for row, part in enumerate(slices.values()):
            record, height = part["candidates"][name], row + (index + 1) / (len(names) + 1) - 0.5
            ends = record["gap_interval"] or [record["gap"]] * 2
            axes.plot(ends, [height] * 2, color=own["color"], linewidth=2.5, alpha=0.5)
            label = name if row == 0 else None
            axes.plot(record["gap"], height, own["marker"], color=own["color"], label=label)
    axes.axvline(0, color="#000000", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(slices)), list(slices))
    axes.set_ylim(len(slices) - 0.5, -0.5)
    axes.set_xlabel("gap to the teacher, nats per token (bar: 95 %)")
    axes.legend(fontsize=8, frameon=False)
    return figure


def draw_fits(result: dict) -> Figure | None:
    """The fit error of each converted layer on held-out tokens; None where none was recorded.

    Candidates that share a fit, such as a conversion and its finetune, share a line.
    """
    lines: dict[tuple, list[int]] = {}
    names = list(result["candidates"])
    for index, name in enumerate(names):
        fit = (result["candidates"][name]["origin"] or {}).get("fit", {})
        errors = fit.get("heldout_error", [])
        if not any(error is not None for error in errors):
            errors = fit.get("affine_error", [])
        known = tuple((x, y) for x, y in zip(fit.get("layer", []), errors, strict=False) if y)
        if known:
            lines.setdefault(known, []).append(index)
    if not lines:
        return None
    figure, (axes,) = new_figure(11, 3.8)
    for known, owners in lines.items():
        label = ", ".join(names[index] for index in owners)
        x, y = zip(*known, strict=True)
        axes.plot(x, y, linewidth=1, markersize=4, label=label, **style(owners[0]))
    axes.set(xlabel="layer", ylabel="share of the output's power", yscale="log")
    axes.set_title("Fit error of each layer on held-out tokens", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, frameon=False)
    return figure


def draw_training(result: dict) -> Figure | None:
    """Gap and KL against training tokens, as logged; None where nothing was finetuned."""
    figure, panels = new_figure(11, 3.8, 2)
    titles = {"gap": "Gap to the teacher", "kl": "KL to the teacher"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for index, (name, record) in enumerate(result["candidates"].items()):
            curve = (record["origin"] or {}).get("training") or {"tokens": []}
            own = style(index)
            kinds = ((key, "training text", "--"), (f"heldout_{key}", "held out", "-"))
            for kind, text, look in kinds:
                pairs = zip(curve["tokens"], curve.get(kind, []), strict=False)
                known = [(x, y) for x, y in pairs if y is not None]
                if known:
                    x, y = zip(*known, strict=True)
                    axes.plot(x, y, look, lw=1, ms=3.5, label=f"{name}, {text}", **own)
            if axes.lines and curve["tokens"]:
                axes.axhline(record[key], color=own["color"], linewidth=0.9, linestyle=":")
        axes.set(xlabel="training tokens", ylabel="nats per token", ylim=(0, None))
        axes.set_title(f"{title} in training (dotted: as evaluated here)", fontsize=10)
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
        axes.xaxis.set_major_locator(MaxNLocator(5))
    if not any(axes.lines for axes in panels):
        return None
    panels[0].legend(fontsize=8, frameon=False)
    return figure
