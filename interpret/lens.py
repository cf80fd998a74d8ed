"""A converted model in TransformerLens, with the same logits and hooks on the block's halves.

TransformerLens's own gated MLP takes any activation that it does not know for SiLU once weights are
processed (`resolve_activation_fn`), and would so compute another model without a word. The bridge
here asks the block itself what it computes. `pip install transformer-lens`; tried with 4.3.
"""

import copy
from importlib import import_module
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize import BilinearMLP, InputError
from bilinearize.interpret.layers import decoder_layers

PREFIX = "Bilinear"


def to_transformer_lens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A `TransformerBridge` over a copy of a converted model.

    Hooks of a block, next to the usual: `blocks.N.mlp.gate.hook_out` and `mlp.in.hook_out` (the two
    halves of the product, rank factors of a slot adjacent), `mlp.hook_score` (their product, summed
    over the rank, before sigma; of a gated layer what `down_proj` reads), `mlp.out.hook_out`.

    Raises:
        InputError: if transformer-lens is missing, or knows no such family.
    """
    try:
        factory = import_module("transformer_lens.factories.architecture_adapter_factory")
        bridges = import_module("transformer_lens.model_bridge")
    except ImportError as error:
        raise InputError("TransformerLens is missing: pip install transformer-lens.") from error
    blocks = [layer.mlp for layer in decoder_layers(model)]
    name = type(model).__name__
    if not name.startswith(PREFIX) or not all(isinstance(mlp, BilinearMLP) for mlp in blocks):
        raise InputError(f"{name} is no converted model; TransformerLens reads it by itself.")
    source = factory.SUPPORTED_ARCHITECTURES.get(name.removeprefix(PREFIX))
    if source is None:
        raise InputError(f"TransformerLens has no adapter for {name.removeprefix(PREFIX)}.")
    # Both tables: booting asks the first whether the name is known, and the second for the class.
    adapter = _adapter(source)
    factory.SUPPORTED_ARCHITECTURES[name] = adapter
    factory.ArchitectureAdapterFactory.register_adapter(name, adapter)
    twin = copy.deepcopy(model)
    twin.config.architectures = [name]
    return bridges.TransformerBridge.boot_transformers(
        str(model.config.name_or_path), hf_model=twin, tokenizer=copy.deepcopy(tokenizer)
    )


def _adapter(source: Any) -> type:
    """The family's own adapter with the MLP exchanged."""
    linear = import_module("transformer_lens.model_bridge.generalized_components.linear")

    class BilinearAdapter(source):
        def __init__(self, cfg: Any):
            super().__init__(cfg)
            parts = {"gate": "gate_proj", "in": "up_proj", "out": "down_proj"}
            bridge = _mlp_bridge()(
                name="mlp",
                config=self.cfg,
                submodules={key: linear.LinearBridge(name=name) for key, name in parts.items()},
            )
            self.component_mapping["blocks"].submodules["mlp"] = bridge

    return BilinearAdapter


def _mlp_bridge() -> type:
    """A `GatedMLPBridge` whose forward is the block's."""
    gated = import_module("transformer_lens.model_bridge.generalized_components.gated_mlp")
    hooks = import_module("transformer_lens.hook_points")

    class BilinearMLPBridge(gated.GatedMLPBridge):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.hook_score = hooks.HookPoint()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            block = self.original_component
            x = self.hook_in(args[0])
            q, k = self.gate(x), getattr(self, "in")(x)
            if block.form == "gated":
                hidden = self.hook_score(block.act_fn(q) * k)
            else:
                score = (q * k).unflatten(-1, (-1, block.rank)).sum(-1)
                hidden = block.act_fn(self.hook_score(score))
            return self.hook_out(self.out(hidden))

    return BilinearMLPBridge
