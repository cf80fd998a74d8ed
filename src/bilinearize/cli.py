"""The command line, `bilinearize COMMAND`: thin over one call each.

Flags and YAML come from the same dataclasses (`convert/config.py` and its fellows); inside, the
stages take plain arguments.
"""

import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from bilinearize import __version__
from bilinearize.convert.config import ConvertConfig, ExportConfig, ScanConfig
from bilinearize.eval.config import EvalConfig
from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.launch import is_launched, launch
from bilinearize.interpret import config as interpret_config
from bilinearize.model.errors import InputError
from bilinearize.pipeline import RunConfig, args_of, run_all
from bilinearize.publish.config import PushConfig


def run_convert(args: Namespace) -> None:
    """`bilinearize convert`."""
    from bilinearize.convert.run import convert, describe_fit

    record = convert(args.source, Path(args.out), **args_of(args, ConvertConfig))
    print(f"{args.out}: {record['method']} conversion of {args.source}, {record['seconds']} s")
    for line in describe_fit(record):
        print(line)


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
    sub.add_argument("--launch", type=int, default=0, help="Start so many processes of it.")
    sub.add_argument("--accelerate", type=str, help="Configuration of accelerate for --launch.")
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


CONFIGS = (ConvertConfig, ScanConfig, FinetuneConfig, EvalConfig, PushConfig, RunConfig)
OPTIONS = {f.name for kind in CONFIGS for f in fields(kind)}
SWITCHES = {f.name for kind in CONFIGS for f in fields(kind) if f.type is bool}


def spell_out(argv: list[str]) -> list[str]:
    """`--dry-run` as `--dry_run true`: hyphens are taken, and a switch needs no value."""
    words = []
    for index, word in enumerate(argv):
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        parts = [part.replace("-", "_") for part in name.split(".")]
        # Other parts are names that the user gave, such as those of slices.
        parts = [a if a in OPTIONS else b for a, b in zip(parts, name.split("."), strict=True)]
        words.append("--" + ".".join(parts) + equals + value)
        following = argv[index + 1 : index + 2]
        if parts[-1] in SWITCHES and not equals:
            if not following or following[0].lower() not in ("true", "false", "yes", "no"):
                words.append("true")
    return words


COMMANDS = {
    "convert": run_convert,
    "scan": run_scan,
    "export": run_export,
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
        if args.command == "finetune" and args.finetune.launch and not is_launched():
            status = launch(argv, args.finetune.launch, args.finetune.accelerate)
            if status:
                raise SystemExit(status)
            return
        COMMANDS[args.command](args[args.command])
    except (InputError, ArgumentError) as error:
        print(f"bilinearize: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
