"""Numbers and tables as text, for reports and model cards."""

import math
from collections.abc import Sequence

NOT_KNOWN = "n/a"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, the first row its header: also for the terminal."""
    rows = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_size(value: float | None, decimals: int = 2) -> str:
    """A number of unknown size: 0.0123, 41.53, 412.6, 138,214."""
    if value is None:
        return "over 1e300"
    if value >= 1e9:
        return f"{value:.2e}"
    digits = 0 if value == 0 else math.floor(math.log10(abs(value))) + 1
    return f"{value:,.{max(0, min(decimals, decimals + 2 - digits))}f}"


def format_gap(gap: float, interval: Sequence[float] | None) -> str:
    """`+0.123 [0.119, 0.127]`, with decimals enough to show the width of the interval."""
    if interval is None:
        return f"{gap:+.3f} [{NOT_KNOWN}]"
    half = (interval[1] - interval[0]) / 2
    decimals = 3 if half == 0 else min(7, max(3, 1 - math.floor(math.log10(half))))
    low, high = (f"{end:.{decimals}f}" for end in interval)
    return f"{gap:+.{decimals}f} [{low}, {high}]"
