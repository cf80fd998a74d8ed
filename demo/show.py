"""Print the text that each model of a finished run wrote, next to the teacher's.

python demo/show.py runs/demo
"""

import json
import sys
from pathlib import Path


def show(run: Path) -> str:
    """The samples of the run's report as text."""
    result = json.loads((run / "eval" / "eval.json").read_text(encoding="utf-8"))
    lines = []
    for sample in result["samples"][:2]:
        lines += ["", "Prompt: ..." + quote(sample["prompt"][-200:])]
        lines.append(f"  teacher:   {quote(sample['teacher'])}")
        for name, text in sample["candidates"].items():
            lines.append(f"  {name + ':':<10} {quote(text)}")
    lines += ["", f"The report: {run / 'eval'}/eval.html, eval.md"]
    return "\n".join(lines)


def quote(text: str) -> str:
    """One line, line breaks shown."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


if __name__ == "__main__":
    print(show(Path(sys.argv[1])))
