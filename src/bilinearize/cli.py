"""The command line, `bilinearize COMMAND`: thin over one call each.

Flags and YAML come from the same dataclasses (`convert/config.py` and its fellows); inside, the
stages take plain arguments.
"""

import json
import sys
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from bilinearize import __version__
from bilinearize.convert.config import ConvertConfig, ExportConfig, ScanConfig
from bilinearize.eval.config import EvalConfig
from bilinearize.finetune.config import FinetuneConfig
from bilinearize.interpret import config as interpret_config
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


def run_convert(args: Namespace) -> None:
    """`bilinearize convert`."""
    from bilinearize.convert.run import convert

    record = convert(args.source, Path(args.out), **args_of(args, ConvertConfig))
    print(f"{args.out}: {record['method']} conversion of {args.source}, {record['seconds']} s")


def run_scan(args: Namespace) -> None:
    """`bilinearize scan`."""
    from bilinearize.convert.scan import format_table, scan

    result = scan(args.source, Path(args.out), **args_of(args, ScanConfig))
    print(f"{format_table(result)}\nWrote {args.out}")


def run_export(args: Namespace) -> None:
    """`bilinearize export`."""
    from bilinearize.convert.export import export

    record = export(args.folder, Path(args.out), **args_of(args, ExportConfig))
    print(f"{args.out}: {args.folder} as {record['note']} ({record['class']})")


def run_finetune(args: Namespace) -> None:
    """`bilinearize finetune`."""
    from accelerate import PartialState

    from bilinearize.finetune.run import finetune

    try:
        finetune(args.student, args.teacher, Path(args.out), **args_of(args, FinetuneConfig))
    finally:
        PartialState().destroy_process_group()


def run_eval(args: Namespace) -> None:
    """`bilinearize eval`."""
    from accelerate import PartialState

    from bilinearize.eval.compare import evaluate

    names = [Path(candidate).name for candidate in args.candidates]
    if len(set(names)) != len(names):
        names = list(args.candidates)
    candidates = dict(zip(names, args.candidates, strict=True))
    try:
        evaluate(args.teacher, candidates, Path(args.out), **args_of(args, EvalConfig))
    finally:
        PartialState().destroy_process_group()


def run_compare(args: Namespace) -> None:
    """`bilinearize compare`."""
    from bilinearize.eval.runs import compare

    compare([Path(run) for run in args.runs], Path(args.out))


def run_push(args: Namespace) -> None:
    """`bilinearize push`."""
    from bilinearize.publish.push import push

    push(Path(args.folder), args.repo, **args_of(args, PushConfig))


# `bilinearize interpret ...`: config, function, help. Modules are imported when called.
INTERPRET = {
    "spectrum": ("SpectrumConfig", "run.spectrum", "Eigenvectors of what layers write."),
    "attribute": ("AttributeConfig", "run.attribution", "What made a layer write, on a prompt."),
    "symmetry": ("SymmetryConfig", "measure.symmetry", "How far a model is from the symmetries."),
    "correlate": ("CorrelateConfig", "measure.correlate_layers", "How low the rank is, on text."),
    "gallery": ("GalleryConfig", "gallery.gallery", "A page: what layers read and write."),
    "digits": ("DigitsConfig", "digits_report.digits", "A bilinear classifier of digits."),
}


def run_interpret(args: Namespace) -> None:
    """`bilinearize interpret`."""
    kind, path, _ = INTERPRET[args.interpret_command]
    chosen = args[args.interpret_command]
    module, _, function = path.partition(".")
    call = getattr(import_module(f"bilinearize.interpret.{module}"), function)
    models = [chosen.model] if "model" in chosen else []
    call(*models, Path(chosen.out), **args_of(chosen, getattr(interpret_config, kind)))
    print(f"Wrote {chosen.out}/index.html")


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


def build_parser() -> ArgumentParser:
    """All subcommands, their flags derived from the dataclasses."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="bilinearize",
        description="Rewrite a language model's SwiGLU MLPs as bilinear blocks, win quality "
        "back by a short finetune, and measure the gap that is left.",
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"bilinearize {__version__}")
    commands = parser.add_subcommands(dest="command", required=True)

    def command(name: str, text: str) -> ArgumentParser:
        sub = ArgumentParser(description=text, exit_on_error=False)
        sub.add_argument("--config", action="config", help="YAML file with any of these options.")
        commands.add_subcommand(name, sub, help=text)
        return sub

    sub = command("convert", "Rewrite a model's gated MLPs as bilinear blocks.")
    sub.add_argument("source", help="Folder, hub id or .gguf file of the original model.")
    sub.add_argument("out", help="Folder to write; must not exist.")
    sub.add_class_arguments(ConvertConfig)
    sub = command("scan", "Measure what each layer costs when it alone is converted.")
    sub.add_argument("source", help="Folder, hub id or .gguf file of the original model.")
    sub.add_argument("out", help="Folder for the report; must not exist.")
    sub.add_class_arguments(ScanConfig)
    sub = command("export", "Write a converted model otherwise: stock classes, signed squares.")
    sub.add_argument("folder", help="Folder of the converted model.")
    sub.add_argument("out", help="Folder to write; must not exist.")
    sub.add_class_arguments(ExportConfig)
    sub = command("finetune", "Train a converted model back towards its teacher.")
    sub.add_argument("student", help="Folder of the converted model.")
    sub.add_argument("out", help="Folder to write; must not exist.")
    sub.add_argument("--teacher", required=True, help="The original model.")
    sub.add_class_arguments(FinetuneConfig)
    sub = command("eval", "Compare converted models with their teacher on the same tokens.")
    sub.add_argument("teacher", help="The original model.")
    sub.add_argument("candidates", nargs="+", help="Folders of converted models.")
    sub.add_argument("--out", required=True, help="Folder for the report; must not exist.")
    sub.add_class_arguments(EvalConfig)
    sub = command("interpret", "Read a converted model from its weights.")
    readers = sub.add_subcommands(dest="interpret_command", required=True)
    for name, (kind, _, text) in INTERPRET.items():
        reader = ArgumentParser(description=text, exit_on_error=False)
        reader.add_argument("--config", action="config", help="YAML file with these options.")
        if name != "digits":
            reader.add_argument("model", help="Folder of a converted model.")
        reader.add_argument("out", help="Folder for the report; must not exist.")
        reader.add_class_arguments(getattr(interpret_config, kind))
        readers.add_subcommand(name, reader, help=text)
    sub = command("compare", "One table and plot over finished runs.")
    sub.add_argument("runs", nargs="+", help="Folders of finished runs, or of reports.")
    sub.add_argument("--out", required=True, help="Folder for the comparison; must not exist.")
    sub = command("push", "Verify a converted model and upload it with its card.")
    sub.add_argument("folder", help="Folder of a converted model, or of a finished run.")
    sub.add_argument("repo", help="Repository on the hub, owner/name.")
    sub.add_class_arguments(PushConfig)
    sub = command("run", "Convert, finetune and evaluate as a YAML file says.")
    sub.add_class_arguments(RunConfig)
    return parser


def check_yaml(argv: list[str]) -> None:
    """Raise InputError for a --config that is missing or no YAML mapping, naming the file."""
    for flag, value in zip(argv, argv[1:], strict=False):
        if flag != "--config":
            continue
        try:
            content = yaml.safe_load(Path(value).read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InputError(f"{value}: not a readable YAML file: {error}") from error
        if not isinstance(content, dict):
            raise InputError(f"{value}: holds no keys; write one `key: value` a line.")


CONFIGS = (ConvertConfig, ScanConfig, FinetuneConfig, EvalConfig, PushConfig)
SWITCHES = {f.name for kind in CONFIGS for f in fields(kind) if f.type is bool}


def spell_out(argv: list[str]) -> list[str]:
    """`--dry-run` as `--dry_run true`: hyphens are taken, and a switch needs no value."""
    words = []
    for index, word in enumerate(argv):
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("-", "_").replace("__", "--", 1)
        words.append(name + equals + value)
        following = argv[index + 1 : index + 2]
        if name.rpartition(".")[2].lstrip("-") in SWITCHES and not equals:
            if not following or following[0].lower() not in ("true", "false", "yes", "no"):
                words.append("true")
    return words


COMMANDS = {
    "convert": run_convert,
    "scan": run_scan,
    "finetune": run_finetune,
    "eval": run_eval,
    "interpret": run_interpret,
    "compare": run_compare,
    "push": run_push,
    "run": run_all,
}


def main(argv: list[str] | None = None) -> None:
    """Parse, run one command; bad input is one line on stderr and exit status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["run"] and len(argv) > 1 and not argv[1].startswith("-"):
        argv.insert(1, "--config")
    argv = spell_out(argv)
    try:
        check_yaml(argv)
        args = build_parser().parse_args(argv)
        COMMANDS[args.command](args[args.command])
    except (InputError, ArgumentError) as error:
        print(f"bilinearize: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
