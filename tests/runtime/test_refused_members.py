"""What a split transformer cannot follow is refused where it is asked for, with the reason, before and after the split."""

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import hooks
from torch import nn

from dit_pipelining.api import ParallelConfig, load_pipeline, parallelize
from dit_pipelining.errors import ConfigError, SplitError
from tests import checkpoints
from tests.distributed import RankPool
from tests.layouts import LAYOUTS

CACHES = {
    "first block": hooks.FirstBlockCacheConfig(threshold=0.1),
    "PAB": hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    ),
    "FasterCache": hooks.FasterCacheConfig(),
    "MagCache": hooks.MagCacheConfig(num_inference_steps=2, mag_ratios=[1.0, 1.0]),
    "SeaCache": hooks.SeaCacheConfig(),
    "TextKV": hooks.TextKVCacheConfig(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.flux(tmp_path_factory.mktemp("refused") / "flux")


def paint(pipeline: Any, **changes: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    options = dict(height=8, width=8, max_sequence_length=16, num_inference_steps=2, output_type="latent")
    images: torch.Tensor = pipeline("a red cat", generator=torch.Generator().manual_seed(7), **options | changes).images
    return images


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except SplitError as error:
        return str(error)
    return "not refused"


def refusals(pipeline: Any, folder: Path) -> dict[str, str]:
    model = pipeline.transformer
    found = {name: refusal(lambda cache=cache: model.enable_cache(cache)) for name, cache in CACHES.items()}
    return found | {
        "offload": refusal(lambda: model.enable_group_offload(torch.device("cpu"), torch.device("cpu"))),
        "save": refusal(lambda: pipeline.save_pretrained(folder / "saved")),
        "compile": refusal(model.compile),
        "deepcopy": refusal(lambda: copy.deepcopy(pipeline)),
        "pickle": refusal(lambda: pickle.dumps(model)),
        "pickle of the pipeline": refusal(lambda: pickle.dumps(pipeline)),
        "cast": refusal(lambda: pipeline.to(torch.bfloat16)),
        "move": refusal(lambda: pipeline.to("meta")),
    }


EXPECTED = dict.fromkeys(CACHES, "disable_cache") | {
    "offload": "use more ranks",
    "save": "copy the folder",
    "compile": "compile='blocks'",
    "deepcopy": "would need ranks of its own",
    "pickle": "pickling or copy.copy of a FluxTransformer2DModel",
    "pickle of the pipeline": "Pickle the path",
    "cast": "cannot be moved to torch.bfloat16",
    "move": "cannot be moved to meta",
}


BOTH = pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2-cfg2", marks=pytest.mark.full)])


def world_size(layout: str) -> int:
    return 4 if layout == "pp2-cfg2" else 2


def refused_before_and_after(
    folder: Path, layout: str
) -> tuple[list[dict[str, str]], dict[str, str], str, torch.Tensor]:
    pipeline = load_pipeline(folder, ParallelConfig(**LAYOUTS[layout]))
    found = [refusals(pipeline, folder)]
    model = pipeline.transformer
    awaiting = {
        "fuse_lora": refusal(lambda: model.fuse_lora()),
        "fuse_qkv_projections": refusal(lambda: model.fuse_qkv_projections()),
        "casting": refusal(lambda: model.enable_layerwise_casting(compute_dtype=torch.float32)),
    }

    def call_meanwhile(_: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        def call() -> None:
            found[0]["a call of another thread"] = refusal(lambda: paint(pipeline))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return values

    first = paint(pipeline, callback_on_step_end=call_meanwhile)
    found.append(refusals(pipeline, folder))
    pipeline.transformer = torch.compile(model)
    found[-1]["wrapped by torch.compile"] = refusal(lambda: paint(pipeline))
    pipeline.transformer = model
    hooks.apply_first_block_cache(model, CACHES["first block"])  # past the model's own method
    hooked = refusal(lambda: paint(pipeline))
    return found, awaiting, hooked, first


@BOTH
def test_what_cannot_be_followed_is_refused_and_leaves_the_pipeline_as_it_is(
    ranks: RankPool, folder: Path, layout: str
) -> None:
    [expected] = ranks.run(1, plain, folder)
    for found, awaiting, hooked, image in ranks.run(world_size(layout), refused_before_and_after, folder, layout):
        assert "compile='blocks'" in found[-1].pop("wrapped by torch.compile")
        assert "Make one at a time" in found[0].pop("a call of another thread")
        for answers in found:
            assert {name: part for name, part in EXPECTED.items() if part not in answers[name]} == {}
        assert all("first call" in text for text in awaiting.values())
        assert "fbc_leader_block_hook" in hooked
        assert torch.equal(image, expected)


def plain(folder: Path) -> torch.Tensor:
    return paint(diffusers.DiffusionPipeline.from_pretrained(folder))


@pytest.mark.parametrize("name", CACHES)
def test_a_pipeline_whose_cache_is_on_is_refused_before_ranks_meet(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.transformer.enable_cache(CACHES[name])
    with pytest.raises(ConfigError, match="disable_cache"):
        parallelize(pipeline, ParallelConfig(pipeline_parallel_size=2))


def write(model: Any) -> None:
    with torch.no_grad():
        model.transformer_blocks[0].ff.net[2].weight.mul_(2)


def load_into(model: Any) -> None:
    model.load_state_dict({name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()})


def make_from_nothing(model: Any) -> None:
    model.proj_out = nn.Linear(32, 4, device="meta")


def swap_blocks(model: Any) -> None:
    blocks = model.transformer_blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


def take_a_block_out(model: Any) -> None:
    del model.single_transformer_blocks[-1]


CHANGES = {change.__name__: change for change in (write, load_into, make_from_nothing, swap_blocks, take_a_block_out)}


def changed_before_the_first_call(folder: Path, name: str) -> str:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    CHANGES[name](pipeline.transformer)
    return refusal(lambda: paint(pipeline))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_weights_that_are_not_read_yet_is_refused(ranks: RankPool, folder: Path, name: str) -> None:
    for text in ranks.run(2, changed_before_the_first_call, folder, name):
        assert "before the pipeline's first call" in text


def with_a_layer_of_ones_own(folder: Path, layout: str | None) -> torch.Tensor:
    if layout is not None:
        pipeline = load_pipeline(folder, ParallelConfig(**LAYOUTS[layout]))
    else:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    torch.manual_seed(5)
    pipeline.transformer.proj_out = nn.Linear(32, 4)
    pipeline.transformer.transformer_blocks[1].ff.net[2] = nn.Linear(128, 32)
    return paint(pipeline)


@BOTH
def test_layers_put_in_before_the_first_call_are_kept(ranks: RankPool, folder: Path, layout: str) -> None:
    [expected] = ranks.run(1, with_a_layer_of_ones_own, folder, None)
    assert not torch.equal(expected, plain(folder))
    for image in ranks.run(world_size(layout), with_a_layer_of_ones_own, folder, layout):
        assert torch.equal(image, expected)


def test_a_transformer_that_is_compiled_whole_is_refused_before_ranks_meet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.transformer = torch.compile(pipeline.transformer)
    with pytest.raises(ConfigError, match="compile='blocks'"):
        parallelize(pipeline, ParallelConfig(pipeline_parallel_size=2))


def after_a_cache(folder: Path) -> torch.Tensor:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.transformer.enable_cache(CACHES["first block"])
    pipeline.transformer.disable_cache()
    pipeline.transformer.forward = pipeline.transformer.forward  # as a hook of the root leaves it
    return paint(parallelize(pipeline, ParallelConfig(pipeline_parallel_size=2)))


def test_a_cache_that_is_off_again_leaves_nothing_behind(ranks: RankPool, folder: Path) -> None:
    [expected] = ranks.run(1, plain, folder)
    for image in ranks.run(2, after_a_cache, folder):
        assert torch.equal(image, expected)
