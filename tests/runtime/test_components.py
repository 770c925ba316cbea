"""Components that live on one rank give on every rank what they give in one process, and their weights are nowhere else."""

import copy
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
import torch.distributed as dist
from diffusers import (
    FluxImg2ImgPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
)
from torch import nn

from dit_pipelining.api import ParallelConfig, generate, load_pipeline, parallelize
from dit_pipelining.errors import ConfigError
from dit_pipelining.runtime.beside import held_beside
from dit_pipelining.runtime.owned import is_owned
from dit_pipelining.runtime.pending import PendingTensor
from dit_pipelining.runtime.placing import Places
from tests import checkpoints
from tests.distributed import RankPool
from tests.same import assert_same

WAN = dict(prompt="a red cat", negative_prompt="blue", height=16, width=16, num_frames=5, max_sequence_length=16)
FLUX = dict(prompt="a blue circle", height=8, width=8, max_sequence_length=16)
SD3 = dict(prompt="a green square", negative_prompt="red", height=16, width=16, max_sequence_length=16)
CALLS: dict[str, dict[str, Any]] = {"wan": WAN, "flux": FLUX, "sd3": SD3}
PLACED = {"text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "vae"}
IN_FOLDER = {
    "wan": {"text_encoder", "vae"},
    "flux": {"text_encoder", "text_encoder_2", "vae"},
    "sd3": PLACED - {"image_encoder"},
    "i2v": {"text_encoder", "image_encoder", "vae"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("components")
    makers = dict(wan=checkpoints.wan, flux=checkpoints.flux, sd3=checkpoints.sd3, i2v=checkpoints.wan_i2v)
    return {name: make(root / name) for name, make in makers.items()}


def picture(size: int) -> PIL.Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def seeded(pipeline: Any, **call: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    output = pipeline(generator=generator, **{"num_inference_steps": 3, "output_type": "np", **call})
    # What a call draws afterwards tells whether the generators are where one process would have left them.
    data = output.frames if hasattr(output, "frames") else output.images
    return data, torch.rand(2, generator=generator), torch.rand(2)


def plain(folder: Path, pipeline_class: type = diffusers.DiffusionPipeline, **call: Any) -> Any:
    pipeline = pipeline_class.from_pretrained(folder)  # type: ignore[attr-defined]
    torch.manual_seed(3)
    return seeded(pipeline, **call)


def spread(folder: Path, config: dict[str, Any], pipeline_class: type, call: dict[str, Any]) -> Any:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2, **config), pipeline_class=pipeline_class)
    torch.manual_seed(3)
    return seeded(pipeline, **call), held(pipeline)


def held(pipeline: Any) -> set[str]:
    """The encoders and VAEs whose weights are on this rank."""
    found = set()
    for name, component in pipeline.components.items():
        if name in PLACED and component is not None:
            assert is_owned(component), name
            kinds = {parameter.device.type for parameter in component.parameters()}
            assert len(kinds) == 1
            found |= {name} if kinds == {"cpu"} else set()
    return found


def assert_as_plain(results: list[Any], expected: Any, placed: set[str], chosen: dict[str, int] | None = None) -> None:
    """Every rank has the result, and every component is on one rank."""
    for result, _ in results:
        assert_same(result, expected)
    assert sorted(name for _, own in results for name in own) == sorted(placed)
    for name, rank in {"vae": len(results) - 1, **(chosen or {})}.items():
        assert name in results[rank][1]


@pytest.mark.parametrize(
    ("name", "owners"), [("wan", {}), ("flux", {}), ("sd3", {"vae": 0, "text_encoder": 1, "text_encoder_3": 1})]
)
def test_strings_become_the_pictures_of_one_process(
    ranks: RankPool, folders: dict[str, Path], name: str, owners: dict[str, int]
) -> None:
    expected = plain(folders[name], **CALLS[name])
    config = dict(component_ranks=owners)
    results = ranks.run(2, spread, folders[name], config, diffusers.DiffusionPipeline, CALLS[name])
    assert_as_plain(results, expected, IN_FOLDER[name], owners)


@pytest.mark.parametrize(
    ("name", "pipeline_class", "call"),
    [
        ("flux", FluxImg2ImgPipeline, dict(prompt="a cat", height=8, width=8, max_sequence_length=16, strength=0.9)),
        ("sd3", StableDiffusion3Img2ImgPipeline, dict(prompt="a cat", max_sequence_length=16, strength=0.9)),
        ("i2v", WanImageToVideoPipeline, WAN),
    ],
)
def test_pictures_are_encoded_and_sampled_as_in_one_process(
    ranks: RankPool, folders: dict[str, Path], name: str, pipeline_class: type, call: dict[str, Any]
) -> None:
    call = {**call, "image": picture(16)}
    expected = plain(folders[name], pipeline_class, **call)
    assert_as_plain(ranks.run(2, spread, folders[name], {}, pipeline_class, call), expected, IN_FOLDER[name])


def in_memory(folder: Path, call: dict[str, Any]) -> Any:
    pipeline = parallelize(
        diffusers.DiffusionPipeline.from_pretrained(folder), ParallelConfig(pipeline_parallel_size=2)
    )
    torch.manual_seed(3)
    return seeded(pipeline, **call), held(pipeline)


def test_parallelize_drops_the_weights_of_other_ranks_components(ranks: RankPool, folders: dict[str, Path]) -> None:
    expected = plain(folders["flux"], **FLUX)
    assert_as_plain(ranks.run(2, in_memory, folders["flux"], FLUX), expected, IN_FOLDER["flux"])


def on_three_ranks(folder: Path, output_ranks: list[int], vae_rank: int | None) -> Any:
    config = dict(component_ranks={"vae": vae_rank}) if vae_rank is not None else {}
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=3, output_ranks=output_ranks, **config))
    torch.manual_seed(3)
    found = []
    for kind in ("np", "pil", "pt", "latent"):
        data, *draws = seeded(pipeline, **{**WAN, "output_type": kind})
        assert all(isinstance(draw, torch.Tensor) for draw in draws)
        found.append(data if kind != "pil" or data is None else [np.asarray(frame) for frame in data[0]])
    return found


@pytest.mark.parametrize(("output_ranks", "vae_rank"), [([0], None), ([0, 2], 1)])
def test_ranks_without_output_return_none(
    ranks: RankPool, folders: dict[str, Path], output_ranks: list[int], vae_rank: int | None
) -> None:
    expected = []
    for kind in ("np", "pil", "pt", "latent"):
        data = plain(folders["wan"], **{**WAN, "output_type": kind})[0]
        expected.append(data if kind != "pil" else [np.asarray(frame) for frame in data[0]])
    results = ranks.run(3, on_three_ranks, folders["wan"], output_ranks, vae_rank)
    for rank, result in enumerate(results):
        if rank not in output_ranks:
            assert result == [None] * 4
            continue
        for one, other in zip(result, expected, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def tiled(pipeline: Any) -> Any:
    vae = pipeline.vae
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor = 8, 8, 0.25
    latents = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    decoded = vae.decode(latents, return_dict=False)[0]
    pipeline.vae.enable_slicing()
    sliced = vae.decode(latents).sample
    pipeline.vae.disable_tiling()
    return decoded, sliced, vae.decode(latents).sample, vae.use_tiling, vae.use_slicing


def tiled_on_ranks(folder: Path) -> Any:
    return tiled(load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2)))


def test_tiling_and_slicing_reach_the_owner(ranks: RankPool, folders: dict[str, Path]) -> None:
    expected = tiled(StableDiffusion3Pipeline.from_pretrained(folders["sd3"]))
    assert not torch.equal(expected[0], expected[2])
    for result in ranks.run(2, tiled_on_ranks, folders["sd3"]):
        assert_same(result, expected)


def failing_encoder(folder: Path) -> list[str]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    torch.manual_seed(3)
    if dist.get_rank() == 0:
        layer = pipeline.text_encoder.encoder.final_layer_norm
        hook = layer.register_forward_hook(_fail)
    caught = []
    try:
        seeded(pipeline, **WAN)
    except IndexError as error:
        caught.append(str(error))
    if dist.get_rank() == 0:
        hook.remove()
    return [*caught, seeded(pipeline, **WAN)[0]]


def _fail(*_: Any) -> None:
    raise IndexError("this encoder knows no such word")


def test_an_error_of_a_text_encoder_is_raised_on_every_rank_and_can_be_caught(
    ranks: RankPool, folders: dict[str, Path]
) -> None:
    expected = plain(folders["wan"], **WAN)[0]
    for message, result in ranks.run(2, failing_encoder, folders["wan"]):
        assert message == "this encoder knows no such word"
        assert np.array_equal(result, expected)


REQUESTS = [
    WAN,
    {**WAN, "prompt": "a blue dog", "num_inference_steps": 2, "width": 32},
    {**WAN, "prompt": "the moon", "guidance_scale": 1.0},
]


def requests() -> list[dict[str, Any]]:
    return [
        {"num_inference_steps": 3, "output_type": "np", **call, "generator": torch.Generator().manual_seed(seed)}
        for seed, call in enumerate(REQUESTS)
    ]


def rolled(folder: Path, config: dict[str, Any]) -> list[Any]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2, **config))
    return [output.frames for output in generate(pipeline, requests())]


@pytest.mark.parametrize("output_ranks", ["all", [1]])
def test_requests_side_by_side_are_encoded_and_decoded_as_alone(
    ranks: RankPool, folders: dict[str, Path], output_ranks: Any
) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folders["wan"])
    pipeline.set_progress_bar_config(disable=True)
    expected = [pipeline(**call).frames for call in requests()]
    for rank, results in enumerate(ranks.run(2, rolled, folders["wan"], dict(output_ranks=output_ranks))):
        for one, other in zip(results, expected, strict=True):
            assert one is None if output_ranks == [1] and rank == 0 else np.array_equal(one, other)


class Sampler(nn.Module):
    """Draws from both kinds of generators, as language models and some VAEs do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, like: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        drawn = self.scale * torch.randn(4, 6, generator=generator) + torch.rand(6)
        return drawn.t(), {"row": drawn[1], "whole": drawn}


class FakeVAE(Sampler):
    """Counts as a VAE."""


FakeVAE.__module__ = "diffusers.models.autoencoders.fake"


def drawn(vae: nn.Module) -> Any:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(6)
    column, parts = vae(torch.zeros(1), generator=generator)
    parts["whole"].zero_()  # the others are views of it
    return column, parts, torch.rand(1), torch.rand(1, generator=generator)


def drawn_on_ranks(folder: Path) -> Any:
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder)
    pipeline.vae = FakeVAE()
    pipeline = parallelize(pipeline, ParallelConfig(pipeline_parallel_size=2))
    column, parts, *draws = drawn(pipeline.vae)
    return column, column.stride(), parts, draws


def test_random_draws_and_shared_memory_are_those_of_one_process(ranks: RankPool, folders: dict[str, Path]) -> None:
    column, parts, *draws = drawn(FakeVAE())
    for result in ranks.run(2, drawn_on_ranks, folders["sd3"]):
        assert_same(result, (column, column.stride(), parts, draws))


@torch.no_grad()
def by_hand(pipeline: Any) -> Any:
    """What user code touches."""
    pipeline.set_progress_bar_config(disable=True)
    vae, encoder = pipeline.vae, pipeline.text_encoder
    embeddings = pipeline.encode_prompt("a cat", "a dog", None, max_sequence_length=16)
    steps = []

    def halve(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append((step, float(timestep)))
        pipeline._interrupt = step == 1
        return {"latents": tensors["latents"] * 0.5}

    call: dict[str, Any] = {**SD3, "num_inference_steps": 4, "output_type": "latent"}
    latents = pipeline(generator=torch.Generator().manual_seed(1), callback_on_step_end=halve, **call).images
    assert type(latents) is torch.Tensor
    assert not isinstance(latents, PendingTensor)
    facts = (
        *(vae.dtype, vae.device, vae.config.scaling_factor, encoder.dtype, encoder.config.hidden_size),
        *(pipeline.device, pipeline._execution_device, pipeline.dtype, pipeline.transformer.config.num_layers),
        *(pipeline.transformer.dtype, next(vae.parameters()).dtype, vae.training, type(vae).__name__),
    )
    normed = encoder.text_model.final_layer_norm(embeddings[0][..., :32])
    words = pipeline.text_encoder_3.get_input_embeddings()(torch.tensor([1, 2]))
    vae.to(dtype=torch.float64)
    doubled = vae.decode(latents.double()).sample
    return embeddings, steps, latents, vae.encode(doubled).latent_dist.mode(), facts, normed, words, vae.dtype


def by_hand_on_ranks(folder: Path) -> Any:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    refused = {
        "enable_model_cpu_offload": "more ranks",
        "enable_sequential_cpu_offload": "more ranks",
        "enable_group_offload": "more ranks",
        "save_pretrained": "copy the folder",
    }
    for name, advice in refused.items():
        with pytest.raises(ConfigError, match=advice):
            getattr(pipeline, name)("anywhere")
    for part in (pipeline, pipeline.vae, pipeline.transformer, pipeline.text_encoder):
        with pytest.raises(ConfigError, match="copy"):
            copy.deepcopy(part)
    for part in (pipeline, pipeline.vae, pipeline.text_encoder):
        with pytest.raises(ConfigError, match="cannot be moved"):
            part.to("cuda")
    assert pipeline.to("cpu") is pipeline
    other = StableDiffusion3Img2ImgPipeline.from_pipe(pipeline, transformer=pipeline.transformer, vae=pipeline.vae)
    assert other.vae is pipeline.vae
    return by_hand(pipeline)


def test_what_user_code_touches_is_as_in_one_process(ranks: RankPool, folders: dict[str, Path]) -> None:
    expected = by_hand(StableDiffusion3Pipeline.from_pretrained(folders["sd3"]))
    for result in ranks.run(2, by_hand_on_ranks, folders["sd3"]):
        assert_same(result, expected)


def opened_files(folder: Path) -> list[str]:
    """Files that this rank opens while it loads and runs the pipeline."""
    import sys

    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    mapped = Path("/proc/self/maps")
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2))
    seeded(pipeline, **WAN)
    lines = mapped.read_text().splitlines()
    return [name for name in (*opened, *lines) if name.endswith(".safetensors")]


def test_a_rank_opens_no_weights_of_other_ranks_components(ranks: RankPool, folders: dict[str, Path]) -> None:
    first, last = ranks.run(2, opened_files, folders["wan"])
    assert any("text_encoder" in name for name in first)
    assert not any("/vae/" in name for name in first)
    assert any("/vae/" in name for name in last)
    assert not any("text_encoder" in name for name in last)


def without_files(folder: Path, boundary: float) -> Any:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2), boundary_ratio=boundary)
    torch.manual_seed(3)
    result = seeded(pipeline, **{**WAN, "negative_prompt": None})[0]
    unused = pipeline.transformer_2 if boundary == 0.0 else pipeline.transformer
    assert all(parameter.device.type == "meta" for _, parameter in unused.named_parameters())
    return result


@pytest.mark.parametrize(("boundary", "used"), [(0.0, "transformer"), (1.0, "transformer_2")])
def test_a_transformer_without_work_is_not_loaded(ranks: RankPool, tmp_path: Path, boundary: float, used: str) -> None:
    folder = checkpoints.wan(tmp_path / "wan", experts=2)
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0).save_pretrained(
        folder / "scheduler"
    )  # its first timestep is below 1000
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, boundary_ratio=boundary)
    torch.manual_seed(3)
    expected = seeded(pipeline, **{**WAN, "negative_prompt": None})[0]
    for file in (folder / ("transformer_2" if used == "transformer" else "transformer")).glob("*.safetensors*"):
        file.unlink()
    for result in ranks.run(2, without_files, folder, boundary):
        assert np.array_equal(result, expected)


def test_what_a_rank_holds_beside_its_stage_are_its_own_components(folders: dict[str, Path]) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folders["wan"])
    sizes = {
        name: sum(parameter.numel() * 4 for parameter in getattr(pipeline, name).parameters())
        for name in ("text_encoder", "vae")
    }
    config = ParallelConfig(pipeline_parallel_size=2, cfg_parallel_size=2)

    def held_by(owners: dict[str, int]) -> list[int]:
        return [part.bytes for part in held_beside(pipeline, ["transformer"], Places(owners, {}, {}), config)]

    assert held_by({"text_encoder": 0, "vae": 3}) == [sizes["text_encoder"], sizes["vae"]]
    assert held_by({"text_encoder": 0, "vae": 2}) == [max(sizes.values()), 0]
    assert held_by({"vae": 3}) == [sizes["text_encoder"], sum(sizes.values())]
