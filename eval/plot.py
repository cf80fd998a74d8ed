"""The picture of an evaluation: perplexity, divergence by window, loss by position."""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

# Okabe and Ito's palette: told apart by people with any common colour blindness.
TEACHER_COLOUR = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933")
MARKERS = "oD^vP*X"
POSITION_BINS = 24


def draw(result: dict, path: Path) -> None:
    """Draw the figure of a result as PNG. Uses no global state of matplotlib."""
    names = ["teacher", *result["candidates"]]
    records = [result["teacher"], *result["candidates"].values()]
    colours = [TEACHER_COLOUR, *(COLOURS[i % len(COLOURS)] for i in range(len(names) - 1))]
    markers = ["s", *(MARKERS[i % len(MARKERS)] for i in range(len(names) - 1))]
    styles = list(zip(names, records, colours, markers, strict=True))
    figure = Figure(figsize=(13, 3.2 + 0.22 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    perplexity, divergence, position = figure.subplots(1, 3)
    _draw_perplexity(perplexity, styles)
    _draw_divergence(divergence, styles[1:], result)
    _draw_positions(position, styles)
    for axes in (perplexity, divergence, position):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    facts = result["protocol"]
    figure.suptitle(
        f"{facts['tokens_scored']:,} tokens of {', '.join(facts['slices'])}, "
        f"windows of {facts['window']}, {facts['dtype']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _draw_perplexity(axes: Axes, styles: list[tuple]) -> None:
    for row, (_, record, colour, marker) in enumerate(styles):
        nll = record["nll"]
        # The paired interval: how far the model is from this teacher on these tokens.
        centre = nll - record.get("gap", 0.0)
        ends = record.get("gap_interval") or [nll - centre] * 2
        axes.plot([centre + end for end in ends], [row, row], color=colour, linewidth=3, alpha=0.5)
        axes.plot(nll, row, marker, color=colour, markersize=7)
        label = _compact(nll) if row == 0 else f"{_compact(nll)}  (×{_compact(nll - centre)})"
        note = axes.annotate(label, (nll, row), (0, 8), textcoords="offset points", fontsize=8)
        note.set(ha="center", bbox={"fc": "white", "ec": "none", "pad": 0.5})
    axes.axvline(styles[0][1]["nll"], color=TEACHER_COLOUR, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(styles)), [name for name, *_ in styles])
    axes.set_ylim(len(styles) - 0.5, -0.7)
    axes.margins(x=0.25)
    axes.set_xlabel("perplexity, log scale (bar: 95 %, paired)")
    ticks = _round_ticks(*axes.get_xlim())
    axes.set_xticks(np.log(ticks), [_compact(math.log(tick)) for tick in ticks])
    axes.set_title("Perplexity", fontsize=10)


def _round_ticks(low: float, high: float) -> np.ndarray:
    """At most 4 round numbers, their logs from `low` to `high`: powers of ten where there are 3."""
    first, last = math.ceil(low / math.log(10)), math.floor(high / math.log(10))
    if last - first >= 2:
        return 10.0 ** np.arange(first, last + 1, math.ceil((last - first + 1) / 4))
    if high - low > math.log(5):  # 1, 2, 5, 10, ...; else evenly spaced numbers
        ticks = np.outer(10.0 ** np.arange(first - 1, last + 1), (1, 2, 5)).ravel()
    else:
        ticks = np.asarray(MaxNLocator(5).tick_values(math.exp(low), math.exp(high)))
    return ticks[(ticks > math.exp(low)) & (ticks < math.exp(high))]


def _compact(nats: float) -> str:
    """exp(nats) in few characters."""
    value = math.exp(min(nats, 700.0))
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def _draw_divergence(axes: Axes, styles: list[tuple], result: dict) -> None:
    jitter = np.random.default_rng(0)
    drawn = [style for style in styles if style[1]["kl_max"] > 0]
    for row, (name, record, colour, _) in enumerate(styles):
        parts = result["windows"].values()
        means = np.concatenate([np.divide(part["kl"][name], part["tokens"]) for part in parts])
        if not means.any():
            axes.annotate("exactly 0", (0.02, row), xycoords=axes.get_yaxis_transform(), fontsize=8)
            continue
        heights = row + jitter.uniform(-0.22, 0.22, len(means))
        axes.scatter(means, heights, s=9, color=colour, alpha=min(0.6, 30 / len(means) + 0.1))
        axes.plot([record["kl"]] * 2, [row - 0.33, row + 0.33], color=colour, linewidth=2.5)
    if not drawn:
        axes.set_xticks([])
    elif all(record["kl"] > 0 for _, record, *_ in drawn):
        axes.set_xscale("log")
        ticks = _round_ticks(*np.log(axes.get_xlim()))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(styles)), [name for name, *_ in styles])
    axes.set_ylim(len(styles) - 0.4, -0.6)
    axes.set_xlabel("KL to the teacher, nats per token (dot: window, line: mean)")
    axes.set_title("Divergence by window", fontsize=10)


def _draw_positions(axes: Axes, styles: list[tuple]) -> None:
    for name, record, colour, marker in styles:
        loss = np.array(record["nll_by_position"], dtype=float)  # None becomes NaN
        # Bins that widen with the position: early tokens differ most and have the least context.
        edges = np.unique(np.geomspace(1, len(loss) + 1, POSITION_BINS + 1).round().astype(int)) - 1
        bins = [loss[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
        heights = [np.nanmean(each) if np.isfinite(each).any() else np.nan for each in bins]
        centres = (edges[:-1] + edges[1:] + 1) / 2
        axes.plot(
            centres,
            np.array(heights),
            marker,
            linestyle="-",
            color=colour,
            label=name,
            markersize=3.5,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position:g}"))
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("loss, nats per token")
    axes.set_title("Loss by position", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
