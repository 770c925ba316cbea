"""Tiles computed by several ranks become what the unsplit diffusers VAE makes of them with its tiling on."""

import logging
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist

from dit_pipelining.api import ParallelConfig, generate, load_pipeline, parallelize
from dit_pipelining.errors import ConfigError
from tests import checkpoints, vaes
from tests.distributed import RankPool
from tests.same import assert_same

WAN = dict(
    prompt="a red cat",
    negative_prompt="blue",
    height=48,
    width=32,
    num_frames=9,
    max_sequence_length=16,
    output_type="pt",
)
SD3 = dict(prompt="a green square", height=32, width=48, max_sequence_length=16, output_type="pt")
CALLS: dict[str, dict[str, Any]] = {"wan": WAN, "sd3": SD3}
CLASSES = {"wan": "AutoencoderKLWan", "sd3": "AutoencoderKL"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiles")
    return {"wan": checkpoints.wan(root / "wan"), "sd3": checkpoints.sd3(root / "sd3")}


def prepared(pipeline: Any, name: str) -> Any:
    pipeline.vae.enable_tiling()
    for attribute, value in vaes.VAES[CLASSES[name]].tiling.items():
        setattr(pipeline.vae, attribute, value)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def made(pipeline: Any, **call: Any) -> Any:
    output = pipeline(generator=torch.Generator().manual_seed(7), num_inference_steps=2, **call)
    return output.frames if hasattr(output, "frames") else output.images


def tiles_by_rank(vae: Any) -> list[int]:
    found: list[int] = vae.__dict__["_dit_pipelining_owned"].team.tiles_by_rank
    return found


def spread(folder: Path, name: str, size: int, config: dict[str, Any]) -> Any:
    world = dist.get_world_size()
    config = {"pipeline_parallel_size": world, "vae_patch_parallel_size": size, **config}
    with Caught() as caught:
        pipeline = load_pipeline(folder, ParallelConfig(**config))
    assert pipeline.vae.use_tiling
    pipeline = prepared(pipeline, name)
    has_weights = all(parameter.device.type != "meta" for parameter in pipeline.vae.parameters())
    return (
        made(pipeline, **CALLS[name]),
        has_weights,
        tiles_by_rank(pipeline.vae) if has_weights else None,
        caught.texts,
    )


class Caught(logging.Handler):
    """Collects what is logged about tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> "Caught":
        logging.getLogger("dit_pipelining.sharding.vae_tiles").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("dit_pipelining.sharding.vae_tiles").removeHandler(self)


@pytest.mark.parametrize(
    ("name", "world", "size"),
    [
        ("wan", 2, 2),
        ("sd3", 3, 3),
        ("wan", 4, 3),
        pytest.param("sd3", 2, 2, marks=pytest.mark.full),
        pytest.param("wan", 3, 3, marks=pytest.mark.full),
        pytest.param("wan", 4, 4, marks=pytest.mark.full),
        pytest.param("sd3", 4, 4, marks=pytest.mark.full),
    ],
)
def test_pictures_and_videos_are_those_of_the_tiled_vae(
    ranks: RankPool, folders: dict[str, Path], name: str, world: int, size: int
) -> None:
    expected = made(prepared(diffusers.DiffusionPipeline.from_pretrained(folders[name]), name), **CALLS[name])
    results = ranks.run(world, spread, folders[name], name, size, {})
    for result, *_ in results:
        assert torch.equal(result, expected)
    holders = [rank for rank, (_, has_weights, *_) in enumerate(results) if has_weights]
    assert holders == list(range(world - size, world))
    by_rank = results[-1][2]
    assert len(by_rank) == size
    assert min(by_rank) > 0  # each rank has computed some
    assert [bool(texts) for *_, texts in results] == [True] + [False] * (world - 1)
    assert "switches the tiling of" in results[0][-1][0]


def with_vae(folder: Path, name: str, config: dict[str, Any], **options: Any) -> Any:
    """A pipeline in memory with a VAE of another class, spread over all ranks."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.vae = vaes.make(name, **options)
    return parallelize(pipeline, ParallelConfig(**config)).vae


def results(vae: Any, name: str, repeat: int = 1) -> Any:
    torch.manual_seed(5)
    latents, pixels = vaes.latents_of(name), vaes.pixels_of(name)
    with torch.no_grad():
        found = [(vaes.decoded(vae, latents), vaes.encoded(vae, pixels)) for _ in range(repeat)]
    return found, torch.rand(2)


def in_one_process(name: str, repeat: int = 1, **options: Any) -> Any:
    vae = vaes.make(name, **options)
    vae.enable_tiling()
    return results(vae, name, repeat)


def by_hand(folder: Path, name: str, config: dict[str, Any]) -> Any:
    vae = with_vae(folder, name, config)
    return results(vae, name), tiles_by_rank(vae)


QUICK = ("AutoencoderKLHunyuanVideo", "AutoencoderKLCogVideoX")


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=() if name in QUICK and world == 3 else pytest.mark.full)
        for name in vaes.VAES
        for world in (2, 3, 4)
    ],
)
def test_decode_and_encode_of_every_class_are_those_of_one_process(
    ranks: RankPool, folders: dict[str, Path], name: str, world: int
) -> None:
    expected = in_one_process(name)
    answers = ranks.run(
        world, by_hand, folders["sd3"], name, dict(pipeline_parallel_size=world, vae_patch_parallel_size=world)
    )
    for found, _ in answers:
        assert_same(found, expected)
    assert min(answers[-1][1]) > 0


def test_owners_of_other_lines_help_and_get_the_result(ranks: RankPool, folders: dict[str, Path]) -> None:
    expected = in_one_process("AutoencoderKL")
    config = dict(pipeline_parallel_size=2, ulysses_degree=2, vae_patch_parallel_size=3)
    answers = ranks.run(4, by_hand, folders["sd3"], "AutoencoderKL", config)
    for found, _ in answers:
        assert_same(found, expected)
    assert min(answers[2][1]) > 0  # the first owner
    assert answers[3][1] == [0, 0, 0]


def drawing(folder: Path) -> Any:
    with Caught() as caught:
        vae = with_vae(folder, LTX, dict(pipeline_parallel_size=2, vae_patch_parallel_size=2), noise=True)
        return results(vae, LTX, repeat=2), tiles_by_rank(vae), caught.texts


LTX = "AutoencoderKLLTXVideo"


def test_tiles_that_draw_random_numbers_draw_those_of_one_process(ranks: RankPool, folders: dict[str, Path]) -> None:
    expected = in_one_process(LTX, repeat=2, noise=True)
    assert not torch.equal(expected[0][0][0], expected[0][1][0])  # the decoder does draw
    answers = ranks.run(2, drawing, folders["sd3"])
    for found, *_ in answers:
        assert_same(found, expected)
    assert answers[1][1][1] == 0
    assert any("draw random numbers" in text for text in answers[1][2])


def failing_helper(folder: Path) -> Any:
    vae = with_vae(folder, "AutoencoderKL", dict(pipeline_parallel_size=3, vae_patch_parallel_size=2))
    if dist.get_rank() == 1:
        hook = vae._modules["decoder"].register_forward_hook(_fail)
    with pytest.raises(IndexError, match="no such pixel") as caught:
        results(vae, "AutoencoderKL")
    if dist.get_rank() == 1:
        hook.remove()
    return caught.value.__notes__, results(vae, "AutoencoderKL")


def _fail(*_: Any) -> None:
    raise IndexError("no such pixel")


def test_an_error_of_a_helper_is_raised_on_every_rank_and_can_be_caught(
    ranks: RankPool, folders: dict[str, Path]
) -> None:
    expected = in_one_process("AutoencoderKL")
    for notes, found in ranks.run(3, failing_helper, folders["sd3"]):
        assert "on rank 1" in notes[0]
        assert_same(found, expected)


def served(folder: Path) -> Any:
    config = ParallelConfig(pipeline_parallel_size=2, vae_patch_parallel_size=2, timeout_seconds=60)
    pipeline = prepared(load_pipeline(folder, config), "sd3")
    outputs = generate(pipeline, [_request(number) for number in range(3)])
    with Caught() as caught:
        for width in (8, 9, 8, 20):  # one tile, then several
            pipeline.vae.decode(torch.zeros(1, 4, 8, width))
    pipeline.vae.disable_tiling()
    return [output.images for output in outputs], pipeline.vae.decode(torch.ones(1, 4, 9, 20)).sample, caught.texts


def _request(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {**SD3, "num_inference_steps": 2 + number, "width": 32 + 16 * number, "generator": generator}


def test_requests_side_by_side_and_a_vae_that_is_not_tiled_any_more(ranks: RankPool, folders: dict[str, Path]) -> None:
    pipeline = prepared(diffusers.DiffusionPipeline.from_pretrained(folders["sd3"]), "sd3")
    expected = [pipeline(**_request(number)).images for number in range(3)]
    pipeline.vae.disable_tiling()
    with torch.no_grad():
        whole = pipeline.vae.decode(torch.ones(1, 4, 9, 20)).sample
    answers = ranks.run(2, served, folders["sd3"])
    for images, found, _ in answers:
        assert_same(images, expected)
        assert torch.equal(found, whole)
    assert [len(texts) for *_, texts in answers] == [0, 1]
    assert "has 1 tile(s) at this size for 2 ranks" in answers[1][2][0]


def refused(folder: Path) -> None:
    everywhere = ParallelConfig(pipeline_parallel_size=2, vae_patch_parallel_size=2, component_ranks={"vae": "all"})
    with pytest.raises(ConfigError, match="no VAE on one rank whose tiling"):
        load_pipeline(folder, everywhere)


def test_sizes_that_cannot_be_are_refused(ranks: RankPool, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="vae_patch_parallel_size=3: 2 ranks at most"):
        ParallelConfig(pipeline_parallel_size=2, data_parallel_size=2, vae_patch_parallel_size=3)
    with pytest.raises(ConfigError, match="vae_patch_parallel_size=0: expected an integer"):
        ParallelConfig(vae_patch_parallel_size=0)
    ranks.run(2, refused, folders["sd3"])
