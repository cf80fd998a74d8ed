"""The pictures of the reports. No global state of matplotlib is used."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

# Okabe and Ito's palette: told apart by people with any common colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#000000")
DIVERGING = "RdBu_r"


def label(text: str, size: int = 22) -> str:
    """A text short enough for an axis, in characters that the font has."""
    known = get_font(findfont("DejaVu Sans")).get_charmap()
    text = "".join(c if ord(c) in known and c != "$" else "□" for c in text)
    return text if len(text) <= size else text[: size - 1] + "…"


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side, in the house style."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_spectra(spectra: dict[str, np.ndarray], title: str) -> Figure:
    """Eigenvalues of several directions: signed and sorted, and how much of the whole is kept.

    Args:
        spectra: name to (i) eigenvalues, sorted by falling |eigenvalue|.
    """
    figure, (signed, share) = new_figure(11, 3.6, 2)
    for index, (name, values) in enumerate(spectra.items()):
        colour = COLOURS[index % len(COLOURS)]
        style = ("-", "--", ":")[index // len(COLOURS) % 3]
        signed.plot(np.sort(values)[::-1], style, color=colour, linewidth=1.2)
        squares = np.cumsum(values**2) / max(float((values**2).sum()), 1e-300)
        kept = np.arange(1, len(values) + 1)
        share.plot(kept, squares, style, color=colour, linewidth=1.2, label=label(name))
    signed.axhline(0, color="#888888", linewidth=0.6)
    signed.set(xlabel="eigenvector, sorted by eigenvalue", ylabel="eigenvalue", title=title)
    share.set(xscale="log", ylim=(0, 1.02), xlabel="eigenvectors kept, by |eigenvalue|")
    share.set(ylabel="share of the squared norm", title="What a truncation keeps")
    for axes in (signed, share):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.title.set_fontsize(10)
    share.legend(fontsize=7, frameon=False)
    return figure


def draw_matrix(
    matrix: ArrayLike, names: list[str], title: str, colour_label: str = "weight"
) -> Figure:
    """A symmetric matrix as a heat map: zero is white, red adds, blue takes away."""
    matrix = np.asarray(matrix)
    size = max(3.6, 0.27 * len(names) + 1.8)
    figure, (axes,) = new_figure(size + 1.2, size)
    limit = max(float(np.abs(matrix).max()), 1e-300)
    image = axes.imshow(matrix, cmap=DIVERGING, vmin=-limit, vmax=limit)
    shown = [label(name) for name in names]
    axes.set_xticks(range(len(names)), shown, rotation=90, fontsize=7)
    axes.set_yticks(range(len(names)), shown, fontsize=7)
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.7, label=colour_label)
    return figure


def draw_layers(
    series: dict[str, dict[int, float]], ylabel: str, title: str, log: bool = False
) -> Figure:
    """One line for each name over the layers."""
    figure, (axes,) = new_figure(9, 3.4)
    for index, (name, values) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        marker = "osD^vP*X"[index % 8]
        axes.plot(list(values), list(values.values()), marker, ls="-", ms=3.5, lw=1, color=colour)
        axes.lines[-1].set_label(label(name, 40))
    axes.set(xlabel="layer", ylabel=ylabel)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log:
        axes.set_yscale("symlog", linthresh=1e-16)
    else:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)
    return figure


def draw_bars(names: list[str], values: ArrayLike, title: str, xlabel: str) -> Figure:
    """Horizontal bars, the first on top; red adds, blue takes away."""
    values = np.asarray(values)
    figure, (axes,) = new_figure(8, 0.26 * len(names) + 1.1)
    colours = np.where(values >= 0, "#B2182B", "#2166AC")
    axes.barh(range(len(names)), values, color=list(colours))
    axes.set_yticks(range(len(names)), [label(name, 48) for name in names], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(0, color="#444444", linewidth=0.6)
    axes.set_xlabel(xlabel)
    axes.set_title(title, fontsize=10)
    return figure


def draw_histograms(series: dict[str, np.ndarray], threshold: float, title: str) -> Figure:
    """Distributions of correlations, a panel for each name and three in a row."""
    rows = -(-len(series) // 3)
    figure = Figure(figsize=(9.5, 2.5 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 3, squeeze=False, sharex=True).flatten()
    bins = np.linspace(-1, 1, 41).tolist()
    for axes, (name, values) in zip(panels, series.items(), strict=False):
        axes.hist(values, bins, color=COLOURS[0])
        axes.axvline(threshold, color=COLOURS[1], linewidth=1.2)
        share = float((values > threshold).mean())
        axes.set_title(f"{name}: {share:.1%} above {threshold:g}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(series) :]:
        axes.set_visible(False)
    figure.supxlabel("correlation", fontsize=9)
    figure.supylabel("directions", fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure
