"""A report as one self-contained HTML page, its pictures as PNG, its numbers as JSON."""

import base64
import html
import json
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure

from bilinearize.model.checkpoint import atomic_folder

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff;
       max-width: 1100px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 6px;
     border-bottom: 1px solid #d8dee6; } h3 { font-size: 15px; margin: 22px 0 4px; }
p { margin: 6px 0; max-width: 80ch; } img { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: 8px 0; font-size: 13px; }
th, td { padding: 3px 10px; text-align: left; vertical-align: top;
         border-bottom: 1px solid #e4e8ee; }
th { background: #f3f5f8; white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { white-space: pre-wrap; min-width: 15em; max-width: 34em; }
td code { background: #eef2f7; border-radius: 3px; padding: 0 3px; white-space: pre-wrap; }
"""


@dataclass(frozen=True)
class Tokens:
    """A table cell that lists tokens, spaces made visible."""

    texts: list[str]

    @property
    def shown(self) -> list[str]:
        return [show_token(text) for text in self.texts]


@dataclass(frozen=True)
class Number:
    """A table cell with a number that is formatted already."""

    shown: str


@dataclass(frozen=True)
class Text:
    """A table cell with running text, its line ends kept."""

    shown: str


Cell = str | int | float | Tokens | Number | Text


def show_token(text: str) -> str:
    """A token with its spaces and line ends made visible, and never empty."""
    for character, sign in ((" ", "␣"), ("\n", "⏎"), ("\t", "⇥"), ("\r", "␍")):
        text = text.replace(character, sign)
    return "".join(c if c.isprintable() else "�" for c in text) or "(empty)"


def show_direction(name: str) -> str:
    """A token, or the two of a difference, as above."""
    left, found, right = name.partition(" - ")
    return f"{show_token(left)} - {show_token(right)}" if found else show_token(name)


@dataclass
class Page:
    """What a report shows, in order; rendered as HTML and as Markdown from the same parts."""

    title: str
    parts: list[tuple] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)

    def heading(self, text: str, level: int = 2) -> None:
        self.parts.append(("heading", text, level))

    def text(self, text: str) -> None:
        self.parts.append(("text", text))

    def table(self, header: list[str], rows: list[list[Cell]]) -> None:
        self.parts.append(("table", header, rows))

    def picture(self, name: str, figure: Figure, alt: str) -> None:
        """Add a figure, which becomes `name.png`; `alt` says in words what it shows."""
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
        self.pictures[f"{name}.png"] = buffer.getvalue()
        self.parts.append(("picture", f"{name}.png", alt))

    def picture_png(self, name: str, png: bytes, alt: str) -> None:
        """The same for a picture that is drawn already."""
        self.pictures[f"{name}.png"] = png
        self.parts.append(("picture", f"{name}.png", alt))

    def write(self, out: Path, data: dict, markdown: bool = False) -> None:
        """Write `index.html`, `report.json`, the PNGs, and README.md if asked, whole or not at all.

        Raises:
            InputError: if `out` exists already.
        """
        with atomic_folder(out) as folder:
            for name, png in self.pictures.items():
                (folder / name).write_bytes(png)
            (folder / "index.html").write_text(self.to_html(), encoding="utf-8")
            if markdown:
                (folder / "README.md").write_text(self.to_markdown(), encoding="utf-8")
            text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False)
            (folder / "report.json").write_text(text + "\n", encoding="utf-8")

    def to_html(self) -> str:
        title = html.escape(self.title)
        body = [f"<h1>{title}</h1>", *(self._html_part(*part) for part in self.parts)]
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style></head>\n<body>\n"
            + "\n".join(body)
            + "\n</body></html>\n"
        )

    def _html_part(self, kind: str, *content) -> str:
        if kind == "heading":
            return f"<h{content[1]}>{html.escape(content[0])}</h{content[1]}>"
        if kind == "text":
            return f"<p>{html.escape(content[0])}</p>"
        if kind == "picture":
            name, alt = content
            data = base64.b64encode(self.pictures[name]).decode()
            return f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}">'
        header, rows = content
        lines = ["".join(f"<th>{html.escape(name)}</th>" for name in header)]
        lines += ["".join(_html_cell(cell) for cell in row) for row in rows]
        inner = "\n".join(f"<tr>{line}</tr>" for line in lines)
        return f'<div class="scroll"><table>\n{inner}\n</table></div>'

    def to_markdown(self) -> str:
        lines = [f"# {self.title}"]
        for kind, *content in self.parts:
            if kind == "heading":
                lines.append(f"{'#' * content[1]} {_markdown(content[0])}")
            elif kind == "text":
                lines.append(_markdown(content[0]))
            elif kind == "picture":
                lines.append(f"![{content[1]}]({content[0]})")
            else:
                header, rows = content
                table = [
                    "| " + " | ".join(map(_markdown, header)) + " |",
                    "|---" * len(header) + "|",
                ]
                table += ["| " + " | ".join(map(_markdown_cell, row)) + " |" for row in rows]
                lines.append("\n".join(table))
        return "\n\n".join(lines) + "\n"


def _html_cell(cell: Cell) -> str:
    if isinstance(cell, Tokens):
        inner = " ".join(f"<code>{html.escape(text)}</code>" for text in cell.shown)
        return f"<td>{inner}</td>"
    if isinstance(cell, (Number, Text)):
        kind = "number" if isinstance(cell, Number) else "text"
        return f'<td class="{kind}">{html.escape(cell.shown)}</td>'
    if isinstance(cell, str):
        return f"<td>{html.escape(cell)}</td>"
    return f'<td class="number">{format_number(cell)}</td>'


def _markdown_cell(cell: Cell) -> str:
    if isinstance(cell, Tokens):
        # A code span: only the backtick and the table's bar mean anything inside.
        return " ".join(f"`{t.replace('`', 'ˋ').replace('|', '¦')}`" for t in cell.shown)
    if isinstance(cell, (Number, Text)):
        return _markdown(cell.shown.replace("\n", " "))
    return _markdown(cell if isinstance(cell, str) else format_number(cell))


def _markdown(text: str) -> str:
    """Text with what Markdown would take for markup escaped."""
    for sign in "\\`*_<|[":
        text = text.replace(sign, "\\" + sign)
    return text


def format_number(value: float) -> str:
    """3 significant digits, whole numbers as they are."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
