"""Which files go up, and as what: checked, complete, and nothing else."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch

from bilinearize.model.card import Records, read_json, read_records
from bilinearize.model.checkpoint import (
    CARRIED,
    load_causal_lm,
    load_config,
    load_tokenizer,
    weights_sha256,
)
from bilinearize.model.errors import InputError

# Of a checkpoint folder these go up; all else is listed as left out.
PATTERNS = (
    *("config.json", "*.safetensors", "*.safetensors.index.json", "modeling_*.py"),
    *("bilinearize.json", "finetune.json", "export.json", "log.jsonl"),
    *CARRIED,
)
# Our own records name local paths; what is published keeps their last part.
RECORDS = ("bilinearize.json", "finetune.json", "export.json", "eval.json")
PATH_KEYS = ("source", "text", "path", "folder", "student", "teacher")
SCHEMA = 2


@dataclass
class Plan:
    """What a push uploads."""

    records: Records
    files: dict[str, Path | bytes] = field(default_factory=dict)
    """Path in the repository to a file, or to its content where that is written anew."""
    left_out: list[str] = field(default_factory=list)
    report: dict | None = None
    """What `eval.json` holds."""
    measured: str | None = None
    """This checkpoint's name in the report."""

    def size(self, name: str) -> int:
        """Bytes of a file."""
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def lines(self) -> list[str]:
        """The listing of a dry run."""
        width = max(len(name) for name in self.files)
        return [f"{name:<{width}}  {self.size(name):>15,} bytes" for name in self.files]


def find_checkpoint(folder: Path) -> tuple[Path, Path | None]:
    """The checkpoint of a folder, and its report: those of a run, or the folder itself.

    Raises:
        InputError: if there is none.
    """
    if (folder / "config.json").is_file():
        return folder, None
    for name in ("finetuned", "converted"):
        if (folder / name / "config.json").is_file():
            report = folder / "eval"
            return folder / name, report if report.is_dir() else None
    raise InputError(f"{folder}: neither a checkpoint (no config.json) nor a finished run.")


def plan_upload(folder: Path, report: Path | None) -> Plan:
    """Verify a checkpoint and list what of it goes up, the card aside.

    Raises:
        InputError: if the checkpoint isn't whole, or the report is of another one.
    """
    plan = Plan(read_records(folder))
    verify(folder, plan.records)
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_dir() or name == "README.md":
            continue
        if any(fnmatch(name, pattern) or fnmatch(name, f"{pattern}/*") for pattern in PATTERNS):
            plan.files[name] = _public(file)
        else:
            plan.left_out.append(name)
    if report is not None:
        add_report(plan, folder, report)
    return plan


def verify(folder: Path, records: Records) -> None:
    """Check that a checkpoint loads whole, here and by `trust_remote_code`, and computes.

    Raises:
        InputError: that names what is wrong.
    """
    stored = load_config(folder).dtype
    model = load_causal_lm(folder, stored if isinstance(stored, torch.dtype) else torch.float32)
    load_tokenizer(folder)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise InputError(f"{folder}: {name} holds NaN or infinity; it is not published.")
    with torch.inference_mode():
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
    if not logits.isfinite().all():
        raise InputError(f"{folder}: the logits are not finite; it is not published.")
    for kind, reference in records.config.get("auto_map", {}).items():
        module = folder / f"{reference.partition('.')[0]}.py"
        if not module.is_file():
            raise InputError(f"{folder}: no {module.name}, which auto_map names for {kind}.")


def add_report(plan: Plan, folder: Path, report: Path) -> None:
    """Add an evaluation's numbers and picture, once it is clear that they are of this checkpoint.

    Raises:
        InputError: if the folder holds no report, or one of other weights.
    """
    file = report / "eval.json"
    if not file.is_file():
        raise InputError(f"{report}: no eval.json; name the folder that `bilinearize eval` wrote.")
    result = read_json(file)
    if result.get("schema") != SCHEMA:
        raise InputError(
            f"{file}: schema {result.get('schema')}, not {SCHEMA}; evaluate the model again."
        )
    weights = weights_sha256(folder)
    names = [n for n, r in result["candidates"].items() if r["weights_sha256"] == weights]
    if not names:
        raise InputError(f"{file}: no model in it has the weights of {folder}; evaluate it first.")
    plan.report, plan.measured = result, names[0]
    plan.files["eval/eval.json"] = _public(file)
    if (report / "eval.png").is_file():
        plan.files["eval/eval.png"] = report / "eval.png"


def _public(file: Path) -> Path | bytes:
    """A file, or the content of a record with local paths cut to their last part."""
    if file.name not in RECORDS:
        return file
    before = read_json(file)
    after = cut_paths(before)
    return file if after == before else (json.dumps(after, indent=2) + "\n").encode()


def cut_paths(value: object, key: str = "") -> object:
    """A record without the folders of local paths."""
    if isinstance(value, Mapping):
        return {name: cut_paths(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [cut_paths(entry, key) for entry in value]
    local = isinstance(value, str) and key in PATH_KEYS and "/" in value
    if isinstance(value, str) and local and (value[0] in "/.~" or Path(value).exists()):
        return Path(value).name
    return value
