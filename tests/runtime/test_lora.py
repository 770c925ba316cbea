"""LoRA weights on a split pipeline act as in one process."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from dit_pipelining.api import ParallelConfig, load_pipeline, parallelize
from tests import checkpoints
from tests.distributed import RankPool, RanksFailedError

CALL = dict(prompt="a red cat", height=16, width=16, num_frames=5, max_sequence_length=16, num_inference_steps=2)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("lora") / "wan")


@pytest.fixture(scope="module")
def lora(wan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on linears of the blocks and of the glue."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(wan)
    torch.manual_seed(3)
    pipeline.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "linear_1"]))
    for name, parameter in pipeline.transformer.named_parameters():
        if "lora" in name:
            parameter.data.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    pipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(pipeline.transformer))
    return folder


def generate(pipeline: Any, **changes: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    frames: torch.Tensor = pipeline(
        generator=torch.Generator().manual_seed(7), output_type="latent", **CALL, **changes
    ).frames
    return frames


def with_lora(wan: Path, lora: Path, loader: str, called_before: bool) -> list[torch.Tensor]:
    """Latents with the adapter, at half its scale, and after it is unloaded."""
    config = ParallelConfig(pipeline_parallel_size=2)
    if loader == "plain":
        pipeline = diffusers.DiffusionPipeline.from_pretrained(wan)
    elif loader == "load_pipeline":
        pipeline = load_pipeline(wan, config)
    else:
        pipeline = parallelize(diffusers.DiffusionPipeline.from_pretrained(wan), config)
    if called_before:
        generate(pipeline)
    pipeline.load_lora_weights(lora)
    full = generate(pipeline)
    half = generate(pipeline, attention_kwargs={"scale": 0.5})
    pipeline.unload_lora_weights()
    return [full, half, generate(pipeline)]


@pytest.mark.parametrize(
    ("loader", "called_before"), [("load_pipeline", True), ("parallelize", False), ("parallelize", True)]
)
def test_lora_weights_act_as_in_one_process(
    ranks: RankPool, wan: Path, lora: Path, loader: str, called_before: bool
) -> None:
    with torch.no_grad():
        expected = with_lora(wan, lora, "plain", called_before)
    assert not torch.equal(expected[0], expected[2])
    for results in ranks.run(2, with_lora, wan, lora, loader, called_before):
        assert [torch.equal(one, other) for one, other in zip(results, expected, strict=True)] == [True] * 3


def test_an_adapter_that_came_before_its_layers_weights_is_refused(ranks: RankPool, wan: Path, lora: Path) -> None:
    with pytest.raises(RanksFailedError, match="Load adapters after the first call"):
        ranks.run(2, with_lora, wan, lora, "load_pipeline", False)
