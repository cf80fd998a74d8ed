"""The families that can be converted, and their registration with the Auto classes."""

from dataclasses import dataclass
from importlib import import_module

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from bilinearize.model import modeling_bilinear
from bilinearize.model.modeling_bilinear import ROWS, Row


@dataclass(frozen=True)
class Family:
    """One source architecture and the classes that its conversion uses."""

    row: Row
    config: type[PretrainedConfig]
    model: type[PreTrainedModel]
    causal_lm: type[PreTrainedModel]

    @property
    def source_type(self) -> str:
        """`model_type` of the source's config."""
        return self.row.source_type

    @property
    def module(self) -> str:
        """Name of the self-contained file, without `.py`."""
        return self.config.__module__.rpartition(".")[2]

    @property
    def path(self) -> str:
        """Where the self-contained file is."""
        file = import_module(self.config.__module__).__file__
        assert file is not None
        return file

    @property
    def auto_map(self) -> dict[str, str]:
        """The `auto_map` of a converted checkpoint: all three Auto classes."""
        return {
            "AutoConfig": f"{self.module}.{self.config.__name__}",
            "AutoModel": f"{self.module}.{self.model.__name__}",
            "AutoModelForCausalLM": f"{self.module}.{self.causal_lm.__name__}",
        }


def _family(row: Row) -> Family:
    kinds = ("Config", "Model", "ForCausalLM")
    return Family(row, *(getattr(modeling_bilinear, row.class_name(kind)) for kind in kinds))


FAMILIES = {row.source_type: _family(row) for row in ROWS}
CONVERTED_TYPES = {family.config.model_type: family for family in FAMILIES.values()}


def register() -> None:
    """Make every converted family loadable by the Auto classes without a trust flag."""
    for family in FAMILIES.values():
        AutoConfig.register(family.config.model_type, family.config, exist_ok=True)
        AutoModel.register(family.config, family.model, exist_ok=True)
        AutoModelForCausalLM.register(family.config, family.causal_lm, exist_ok=True)
        # So that save_pretrained copies the file that auto_map points to.
        family.config.register_for_auto_class("AutoConfig")
        family.model.register_for_auto_class("AutoModel")
        family.causal_lm.register_for_auto_class("AutoModelForCausalLM")
