"""Print what a finished run shows: the table of its report, then text that each model wrote.

python demo/show.py runs/demo
"""

import json
import sys
from pathlib import Path

from bilinearize.eval.report import format_protocol, format_table


def show(run: Path) -> str:
    """The report of `run` as text."""
    result = json.loads((run / "eval" / "eval.json").read_text(encoding="utf-8"))
    lines = [format_table(result), "", format_protocol(result)]
    for sample in result["samples"]:
        lines += ["", "Prompt: ..." + quote(sample["prompt"][-200:])]
        lines.append(f"  teacher:   {quote(sample['teacher'])}")
        for name, text in sample["candidates"].items():
            lines.append(f"  {name + ':':<10} {quote(text)}")
    lines += ["", f"The same with plots: {run / 'eval'}/eval.md and eval.png"]
    return "\n".join(lines)


def quote(text: str) -> str:
    """One line, line breaks shown."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


if __name__ == "__main__":
    print(show(Path(sys.argv[1])))
