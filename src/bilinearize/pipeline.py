"""`bilinearize run`: convert, finetune, evaluate and push as one YAML file says."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml
from jsonargparse import Namespace

from bilinearize.convert.config import ConvertConfig
from bilinearize.eval.config import EvalConfig
from bilinearize.finetune.config import FinetuneConfig
from bilinearize.model.errors import InputError
from bilinearize.publish.config import PushConfig


@dataclass
class RunConfig:
    """Convert, finetune and evaluate in one go; what is finished already is not done again."""

    source: str
    """The original model: a folder, a hub id or a .gguf file."""
    out: str
    """Run folder. Holds converted/, finetuned/, eval/, the baselines, and config.yaml."""
    convert: ConvertConfig = field(default_factory=ConvertConfig)
    """The conversion."""
    finetune: FinetuneConfig | None = None
    """The finetune; null goes without."""
    eval: EvalConfig | None = None
    """The evaluation; null goes without."""
    baselines: list[str] = field(default_factory=list)
    """Other convert methods to convert with and list in the report, e.g. [taylor]."""
    push: str | None = None
    """Repository on the hub, owner/name, that the result goes to at the end."""
    push_options: PushConfig = field(default_factory=PushConfig)
    """How it goes there."""


def run_all(args: Namespace) -> None:
    """`bilinearize run`: each step that has its output already is skipped."""
    from bilinearize.convert.run import convert
    from bilinearize.eval.compare import evaluate
    from bilinearize.eval.report import format_table
    from bilinearize.finetune.run import finetune

    out = Path(args.out)
    if args.push is not None:
        from bilinearize.publish.push import check_push

        check_push(args.push)  # now, not hours later
    # Where the result goes changes nothing in it.
    kept = [name for name in RunConfig.__dataclass_fields__ if not name.startswith("push")]
    config = {name: args[name] for name in kept}
    config = yaml.safe_load(yaml.safe_dump(Namespace(config).as_dict()))
    settle_config(out, config)
    options = args_of(args.convert, ConvertConfig)
    candidates = {}
    for method in dict.fromkeys([*args.baselines, args.convert.method]):
        folder = out / ("converted" if method == args.convert.method else method)
        if not is_done(folder):
            convert(args.source, folder, **(options | {"method": method}))
        candidates[method] = str(folder)
    if args.finetune is not None:
        folder = out / "finetuned"
        if not is_done(folder):
            settings = args_of(args.finetune, FinetuneConfig)
            finetune(str(out / "converted"), args.source, folder, **settings)
        candidates["finetuned"] = str(folder)
    if args.eval is not None:
        if is_done(out / "eval"):
            print(format_table(json.loads((out / "eval" / "eval.json").read_text())))
        else:
            settings = args_of(args.eval, EvalConfig)
            evaluate(args.source, candidates, out / "eval", **settings)
    if args.push is not None:
        from bilinearize.publish.push import push

        push(out, args.push, **args_of(args.push_options, PushConfig))


def is_done(folder: Path) -> bool:
    """Whether a step's output is there; folders appear under their names only when whole."""
    if folder.is_dir():
        print(f"{folder}: there already, step skipped")
    return folder.is_dir()


# What each part of a run's YAML shapes, so what must go before it can be changed.
SHAPES = {
    "source": ("converted", "finetuned", "eval"),
    "convert": ("converted", "finetuned", "eval"),
    "finetune": ("finetuned", "eval"),
    "eval": ("eval",),
    "baselines": ("eval",),
}


def settle_config(out: Path, config: dict) -> None:
    """Save the resolved config in the run folder, or check that what is finished there agrees.

    Raises:
        InputError: if an output of other settings is there, naming the key and what to remove.
    """
    path = out / "config.yaml"
    if path.is_file():
        before = yaml.safe_load(path.read_text())
        for part, outputs in SHAPES.items():
            if before.get(part) == config[part]:
                continue
            methods = config["baselines"] if part in ("source", "convert") else []
            stale = [name for name in (*outputs, *methods) if (out / name).exists()]
            if stale:
                keys = changed_keys(part, before.get(part), config[part])
                raise InputError(
                    f"{path}: {keys} changed since {', '.join(stale)} in that folder was made; "
                    "remove it or name another out."
                )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is no run folder (no config.yaml); name another out.")
    out.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".partial").write_text(yaml.safe_dump(config, sort_keys=False))
    path.with_suffix(".partial").replace(path)


def changed_keys(part: str, before: object, now: object) -> str:
    """The names of what differs, dotted: `finetune.tokens, finetune.seed`."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return part
    keys = sorted(key for key in before | now if before.get(key) != now.get(key))
    return ", ".join(f"{part}.{key}" for key in keys)


def args_of(args: Namespace, kind: type) -> dict:
    """The part of the parsed flags that belongs to one stage's dataclass, checked by it."""
    return asdict(kind(**{name: args[name] for name in kind.__dataclass_fields__}))
