"""LoRA weights with random values, as a user has them in a folder."""

from collections.abc import Sequence
from pathlib import Path

import diffusers
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

FLUX_TARGETS = (
    r"(.*\.)?(to_q|x_embedder)$|proj_out$",
    r".*\.(ff\.net\.2|proj_mlp|to_v)$",
)
"""Of two adapters: attention, and glue before and after the blocks; both kinds of blocks, and an attention of both."""


def lora(folder: Path, pipeline: Path, targets: str | Sequence[str], seed: int = 0) -> Path:
    """An adapter for the transformer of the pipeline that lies in a folder.

    Args:
        folder: where it is written.
        pipeline: the folder of the pipeline.
        targets: the ends of names of linears, or a pattern of whole names.
        seed: of its values.
    """
    pipe = diffusers.DiffusionPipeline.from_pretrained(pipeline)
    torch.manual_seed(seed)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=targets if isinstance(targets, str) else list(targets)))
    randomise(pipe.transformer)
    pipe.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(pipe.transformer))
    return folder


def randomise(model: torch.nn.Module) -> None:
    """Give the adapters of a model values that act."""
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data.normal_(std=0.3)
