"""One stage of a finetune: from a checkpoint folder to the model that is trained, and back."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.activations import LinearActivation
from transformers.modeling_utils import PreTrainedModel

from bilinearize.finetune.cache import CachedTeacher
from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.groups import DESCRIBED, add_lora, free
from bilinearize.finetune.losses import LossWeights
from bilinearize.finetune.pair import StudentWithTeacher
from bilinearize.finetune.riding import (
    BlendedMLP,
    Homotopy,
    Riding,
    anneal,
    blend,
    fold_annealed,
)
from bilinearize.finetune.teacher import (
    SeparateTeacher,
    SharedTeacher,
    decoder_layers,
    first_difference,
    load_whole,
    norm_names,
)
from bilinearize.model.errors import InputError
from bilinearize.model.modeling_bilinear import BilinearMLP
from bilinearize.model.symmetry import balance_


def build_stage(
    config: FinetuneConfig, student: Path, teacher: Path
) -> tuple[StudentWithTeacher, str]:
    """Load both models in fp32, balance factors, let the source ride along, free what trains.

    Returns:
        The pair that Trainer trains, and a line or two that say what it is.

    Raises:
        InputError: if a checkpoint is not whole, or the homotopy has nothing to move.
    """
    model = load_whole(student)
    layers = decoder_layers(model)
    for layer in layers:
        if isinstance(layer.mlp, BilinearMLP) and layer.mlp.form == "bilinear":
            balance_(layer.mlp)
    kl, cross_entropy, hidden = config.weights()
    if config.layer_weights and len(config.layer_weights) != len(layers):
        count = len(config.layer_weights)
        raise InputError(f"--layer_weights has {count} entries for {len(layers)} layers.")
    homotopy = "none" if config.control else config.homotopy
    weights = LossWeights(
        kl,
        cross_entropy,
        config.temperature,
        hidden,
        config.hidden_target,
        tuple(config.layer_weights),
        0.0 if config.control else config.range_bound,
        config.range_weight,
    )
    original, note = None, None
    teach = weights.need_teacher or config.watches()
    loaded = teach and config.teacher_mode != "cached"
    if loaded or homotopy == "blend":
        source = load_whole(teacher, getattr(torch, config.teacher_dtype))
        note = _ride(config, model, source, homotopy == "blend", loaded)
        original = SeparateTeacher(source) if loaded and note is not None else None
    moving = _homotopy(config, homotopy, layers)
    if config.train == "lora":
        add_lora(model, config.lora_rank, config.seed)
    free(model, config.train)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    if teach and original is None:
        original = SharedTeacher(model) if loaded else CachedTeacher()
    if config.compile:
        compile_layers(layers, config.compile)
    pair = StudentWithTeacher(model, original, weights, config.kl_chunk, moving)
    return pair, _describe(config, pair, note)


def compile_layers(layers: list[Any], backend: str) -> None:
    """Compile each decoder layer by itself, in place.

    Raises:
        InputError: for a backend that there is not.
    """
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        names = ", ".join(torch.compiler.list_backends())
        raise InputError(f"--compile is {backend!r}; use one of {names}.")
    for layer in layers:
        layer.compile(backend=backend)


def _ride(
    config: FinetuneConfig, model: PreTrainedModel, source: PreTrainedModel, mix: bool, teach: bool
) -> str | None:
    """Put the source's modules beside the student's where they are to be mixed or taught from.

    Returns:
        None if all of the source's that differs rides along, else why it can't.
    """
    norms = [
        name
        for name in (norm_names(model) if config.train != "all" else [])
        if config.train == "mlp+norms"
        or not _equal(*(m.get_submodule(name) for m in (model, source)))
    ]
    note = ""
    same = config.teacher_mode == "auto" and config.teacher_dtype == "float32"
    if config.train != "all" and same:
        note = first_difference(model, source, norms)
    shared = teach and note is None
    for layer, theirs in zip(decoder_layers(model), decoder_layers(source), strict=True):
        own = layer.mlp
        mixed = mix and isinstance(own, BilinearMLP) and own.form == "bilinear"
        if shared or mixed:
            # A separate teacher keeps its own: no weight has two places.
            mlp = copy.deepcopy(theirs.mlp) if teach and not shared else theirs.mlp
            layer.mlp = BlendedMLP(own, mlp.float()) if mixed else Riding(own, mlp)
    for name in norms if shared else ():
        model.set_submodule(name, Riding(model.get_submodule(name), source.get_submodule(name)))
    return note


def _equal(first: nn.Module, second: nn.Module) -> bool:
    theirs = second.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in first.state_dict().items())


def _homotopy(config: FinetuneConfig, kind: str, layers: list[Any]) -> Homotopy | None:
    if kind == "none":
        return None
    parts = blend(layers) if kind == "blend" else anneal(layers)
    return Homotopy(parts, config.homotopy_share, config.homotopy_ease)


def _describe(config: FinetuneConfig, pair: StudentWithTeacher, note: str | None) -> str:
    named = pair.student.named_parameters()
    sizes = [(p.numel(), p.requires_grad) for name, p in named if ".source." not in name]
    ours, all_ = sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)
    count = sum(trains for _, trains in sizes)
    line = (
        f"Trains {DESCRIBED[config.train]}: {ours:,} of {all_:,} parameters in {count} tensors; "
        f"teacher: {pair.teacher.mode if pair.teacher is not None else 'none'}."
    )
    if pair.homotopy is not None:
        parts = pair.homotopy.parts
        slotwise = sum(isinstance(part, BlendedMLP) and part.slotwise for part in parts)
        line += f" Homotopy {config.homotopy} in {len(parts)} layers"
        line += f", slot by slot in {slotwise}." if config.homotopy == "blend" else "."
    if pair.teacher is not None and note:
        line += f"\nThe teacher is loaded whole, not shared: {note} differs."
    return line


def finished_model(
    config: FinetuneConfig, student: Path, tensors: dict[str, torch.Tensor]
) -> PreTrainedModel:
    """The plain model that a stage ends with: LoRA merged, the homotopy folded.

    Args:
        student: the folder that the stage began with.
        tensors: what was trained, by plain names.

    Raises:
        RuntimeError: if an MLP is not exactly bilinear after a homotopy.
    """
    model = load_whole(student)
    tuner = add_lora(model, config.lora_rank, config.seed) if config.train == "lora" else None
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
    if tuner is not None:
        tuner.merge_and_unload()
    if config.homotopy == "swish-beta" and not config.control:
        fold_annealed(model)
    if config.homotopy != "none" and not config.control:
        for index, layer in enumerate(decoder_layers(model)):
            check_quadratic(layer.mlp, index)
    return model


@torch.no_grad()
def check_quadratic(mlp: BilinearMLP, layer: int) -> None:
    """Raise RuntimeError unless a bilinear block is a polynomial of degree 2 along a random line.

    The third difference of such a polynomial is 0. Blocks that were converted to another form are
    not looked at.
    """
    if mlp.form != "bilinear" or not isinstance(mlp.act_fn, LinearActivation):
        return
    block = copy.deepcopy(mlp).double()
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(2, block.gate_proj.in_features, generator=generator, dtype=torch.float64)
    steps = torch.arange(4, dtype=torch.float64)[:, None]
    values = block(draw[0] + steps * draw[1])
    third = values[3] - 3 * values[2] + 3 * values[1] - values[0]
    if third.norm() > 1e-9 * values.norm():
        raise RuntimeError(f"the MLP of layer {layer} is not bilinear after the homotopy")
