"""The front door: wrong use is refused at once, with what to change, and pipelines say where they come from."""

import io
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, DiffusionPipeline, UNet2DModel, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn

from dit_pipelining.api import (
    ParallelConfig,
    StreamSpec,
    generate,
    launch,
    load_config,
    load_pipeline,
    open_stream,
    parallelize,
    serve,
    split_model,
)
from dit_pipelining.capture import capturing
from dit_pipelining.costs.measured import Measured, MeasuredProfile
from dit_pipelining.errors import (
    BlocksNotFoundError,
    CheckpointError,
    ConfigError,
    InputError,
    ModelNotFoundError,
    NotATransformerError,
    PartitionError,
)
from dit_pipelining.planning.models import find_model
from dit_pipelining.planning.presets import preset
from dit_pipelining.runtime.attach import split_of
from dit_pipelining.weights.pipelines import empty_transformers
from partitioners import (
    Component,
    CountsNotIntegersError,
    DoesNotFitError,
    NegativeCountError,
    NotAPartitionError,
    RankSpec,
    TooManyStagesError,
    WrongNumberOfCountsError,
    WrongSumError,
)
from tests import checkpoints
from tests.distributed import RankPool, RanksFailedError
from tests.same import assert_same
from tests.zoo import CASES, build_inputs, build_model

VARIABLE = "VLLM_PP_LAYER_PARTITION"
CALL = dict(prompt="a", height=16, width=16, num_frames=5, num_inference_steps=2, output_type="latent")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.wan(tmp_path_factory.mktemp("api") / "wan")


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> ParallelConfig:
    """As if launched with two processes; nothing here gets as far as meeting the other one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    return ParallelConfig(pipeline_parallel_size=2)


# ---- ParallelConfig ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["even", "Balanced", "", 3, None])
def test_an_unknown_partitioner_is_refused_and_the_known_are_listed(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"partitioner=.*'uniform', 'balanced'"):
        ParallelConfig(partitioner=name)


@pytest.mark.parametrize("seconds", ["x", "60", None, True, 0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_seconds="):
        ParallelConfig(timeout_seconds=seconds)


@pytest.mark.parametrize(
    ("partition", "error"),
    [
        ("2,two", CountsNotIntegersError),
        ("", CountsNotIntegersError),
        ([2, 2.0], CountsNotIntegersError),
        ("5,-1", NegativeCountError),
        ("1,1,2", WrongNumberOfCountsError),
        ([4], WrongNumberOfCountsError),
        ([], PartitionError),
        (4, ConfigError),
        ({"transformer": "2,2", "transformer_2": "2"}, WrongNumberOfCountsError),
    ],
)
def test_a_wrong_partition_is_refused_when_the_configuration_is_made(partition: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        ParallelConfig(pipeline_parallel_size=2, partition=partition)


def test_counts_come_from_the_configuration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3,1")
    config = ParallelConfig(pipeline_parallel_size=2, partition={"transformer": "2,2"})
    assert config.counts_for("transformer") == "2,2"
    assert config.counts_for("transformer_2") is None
    assert ParallelConfig(pipeline_parallel_size=2).counts_for("transformer") is None
    assert ParallelConfig(pipeline_parallel_size=2, partition=[1, 3]).counts_for("transformer_2") == [1, 3]


def test_the_early_check_names_where_counts_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelConfig(pipeline_parallel_size=2, partition={"transformer": "2,2"})
    monkeypatch.setenv(VARIABLE, "1,1,2")
    config.check_counts("transformer", 4)
    with pytest.raises(WrongNumberOfCountsError, match=VARIABLE):
        config.check_counts("transformer_2", 4)
    monkeypatch.delenv(VARIABLE)
    config.check_counts("transformer_2", 4)
    with pytest.raises(TooManyStagesError):
        config.check_counts("transformer_2", 1)


def generate_with_variable(folder: Path, text: str, partition: Any) -> tuple[int, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, text)
        pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2, partition=partition))
        pipeline(**CALL)
        split = split_of(pipeline.transformer)
        assert split is not None
        return split.partition.counts


def test_a_wrong_sum_in_the_environment_names_the_variable_on_every_rank(ranks: RankPool, folder: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(2, generate_with_variable, folder, "1,2", None)
    assert str(caught.value).count(f"from the environment variable {VARIABLE}: they sum to 3; expected 4") >= 2


def test_the_environment_decides_where_the_configuration_does_not(ranks: RankPool, folder: Path) -> None:
    assert ranks.run(2, generate_with_variable, folder, "1,3", None) == [(1, 3)] * 2
    assert ranks.run(2, generate_with_variable, folder, "1,3", {"transformer": [3, 1]}) == [(3, 1)] * 2


# ---- split_model ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*args: Any) -> None:
        raise AssertionError("a forward was captured")

    monkeypatch.setattr(capturing, "capture", capture)


def wan() -> tuple[nn.Module, dict[str, Any]]:
    return build_model(CASES["WanTransformer3D"]), build_inputs(CASES["WanTransformer3D"])


def small_vae() -> nn.Module:
    return AutoencoderKL(block_out_channels=(4,), layers_per_block=1, norm_num_groups=1)


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (small_vae, r"AutoencoderKL is not a diffusion transformer.*pipe\.transformer"),
        (lambda: AutoencoderKLWan(base_dim=4, z_dim=4), "AutoencoderKLWan is not a diffusion transformer"),
        (lambda: UNet2DModel(block_out_channels=(4,) * 4, norm_num_groups=1), "UNet2DModel is not"),
        (lambda: WanTransformer3DModel, "the class WanTransformer3DModel"),
        (lambda: "wan", r"got a str\. Pass a diffusers transformer"),
        (lambda: None, "got a NoneType"),
    ],
)
def test_what_is_no_transformer_is_refused(make: Any, message: str) -> None:
    with pytest.raises(NotATransformerError, match=message):
        split_model(make(), 2, {})


@pytest.mark.usefixtures("no_capture")
def test_a_whole_pipeline_is_refused_with_what_to_call(folder: Path) -> None:
    with pytest.raises(NotATransformerError, match=r"WanPipeline is a whole pipeline.*load_pipeline or parallelize"):
        split_model(DiffusionPipeline.from_pretrained(folder), 2, {})


@pytest.mark.usefixtures("no_capture")
def test_a_module_without_blocks_says_how_to_name_them() -> None:
    with pytest.raises(BlocksNotFoundError, match="blocks="):
        split_model(nn.Linear(2, 2), 2, {})


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("num_stages", [0, -1, 2.0, "2", True, None])
def test_a_number_of_stages_that_is_no_positive_integer_is_refused(num_stages: Any) -> None:
    model, inputs = wan()
    with pytest.raises(ConfigError, match=f"num_stages={num_stages!r}"):
        split_model(model, num_stages, inputs)


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(ranks=[RankSpec()] * 3), ConfigError, "describes 3 ranks for 2 stages"),
        (dict(ranks=[]), ConfigError, "describes 0 ranks for 2 stages"),
        (dict(partitioner="even"), ConfigError, "'uniform', 'balanced'"),
        (dict(counts="1,1,2"), WrongNumberOfCountsError, "there are 3 of them; expected 2"),
        (dict(counts=[5, -1]), NegativeCountError, "-1 is negative"),
        (dict(blocks=["layers"]), BlocksNotFoundError, "no submodule 'layers'"),
        (dict(blocks=[]), BlocksNotFoundError, r"blocks=\[\] names no blocks"),
        (dict(topology="ring"), ConfigError, "topology='ring': expected one of auto, nvlink"),
        (dict(components=["vae"]), ConfigError, r"components=\['vae'\]: expected Components"),
        (dict(components=3), ConfigError, "components=3: expected Components"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_capture(changes: Any, error: type[Exception], message: str) -> None:
    model, inputs = wan()
    with pytest.raises(error, match=message):
        split_model(model, 2, inputs, **changes)


@pytest.mark.usefixtures("no_capture")
def test_a_wrong_variable_is_refused_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1,x")
    model, inputs = wan()
    with pytest.raises(CountsNotIntegersError, match=VARIABLE):
        split_model(model, 2, inputs)


@pytest.mark.usefixtures("no_capture")
def test_example_inputs_that_are_no_dict_are_refused() -> None:
    model, inputs = wan()
    with pytest.raises(InputError, match="example_inputs is a list"):
        split_model(model, 2, list(inputs.values()))  # type: ignore[arg-type]


def test_a_wrong_sum_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1,99")
    model, inputs = wan()
    with pytest.raises(WrongSumError, match=VARIABLE):
        split_model(model, 2, inputs)


def test_what_a_split_does_not_have_is_refused() -> None:
    model, inputs = wan()
    with pytest.raises(NotAPartitionError, match=r"the partitioner '<lambda>' returned \[1, 3\]; return a Partition"):
        split_model(model, 2, inputs, partitioner=lambda costs, ranks: [1, 3])  # type: ignore[arg-type, return-value]
    split = split_model(model, 2, inputs)
    for index in (2, -1, "0", 0.0, None):
        with pytest.raises(ConfigError, match=f"there is no stage {index!r}; this split has stages 0 to 1"):
            split.pipeline_stage(index, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no stage 7"):
        split.compile(stages=[7])
    with pytest.raises(ConfigError, match="mode='whole': expected one of blocks, blocks-cudagraphs"):
        split.compile("whole")
    with pytest.raises(InputError, match="missing a required argument: 'hidden_states'"):
        split.kwargs_chunk_spec({})


# ---- what somebody could pass in place of something else -----------------------------------------------------------

CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "a model as a pipeline": (
        lambda p, f: parallelize(p.transformer, ParallelConfig()),
        NotATransformerError,
        "got Wan",
    ),
    "a path as a pipeline": (lambda p, f: parallelize("wan", ParallelConfig()), NotATransformerError, "got str"),
    "a class as a pipeline": (
        lambda p, f: parallelize(type(p), ParallelConfig()),
        NotATransformerError,
        "the class Wan",
    ),
    "no pipeline to generate": (lambda p, f: generate(None, []), NotATransformerError, "got NoneType"),
    "no pipeline to serve": (lambda p, f: serve(None).__enter__(), NotATransformerError, "got NoneType"),
    "no pipeline to stream": (
        lambda p, f: open_stream(None, height=16, width=16, prompt="a"),
        NotATransformerError,
        "got NoneType",
    ),
    "no configuration": (lambda p, f: parallelize(p, None), ConfigError, "a ParallelConfig, got None"),
    "a dict as a configuration": (
        lambda p, f: load_pipeline(f, {"ranks": "24GB"}),
        ConfigError,
        "got {'ranks': '24GB'}",
    ),
    "a path as a configuration": (lambda p, f: parallelize(p, "a.yaml"), ConfigError, r"load_config\('config.yaml'\)"),
    "a number as a file": (lambda p, f: load_config(3), ConfigError, "path of a YAML file, got 3"),
    "a pipeline as a folder": (lambda p, f: load_pipeline(p), ModelNotFoundError, "hub id, got WanPipeline"),
    "a name as a class": (
        lambda p, f: load_pipeline(f, pipeline_class="WanPipeline"),
        ConfigError,
        "pipeline_class='WanPipeline': expected a class",
    ),
    "another class": (lambda p, f: load_pipeline(f, pipeline_class=str), ConfigError, "pipeline_class=<class 'str'>"),
    "a name as a dtype": (lambda p, f: load_pipeline(f, dtype="bfloat16"), ConfigError, "dtype='bfloat16': expected"),
    "a name among dtypes": (lambda p, f: load_pipeline(f, dtype={"vae": "half"}), ConfigError, "expected a dtype"),
    "a number of requests": (lambda p, f: generate(p, 3), InputError, "requests is int: expected a list of dicts"),
    "one request": (lambda p, f: generate(p, {"prompt": "a"}), InputError, "requests is dict: expected a list"),
    "a number as a function": (
        lambda p, f: generate(p, [], on_output=3),
        InputError,
        "on_output=3: expected a function",
    ),
    "no function to launch": (lambda p, f: launch(None, nproc=2), ConfigError, "a function to launch, got None"),
    "a number as levels": (lambda p, f: StreamSpec(levels=3), ConfigError, "levels=3: expected falling numbers"),
}


@pytest.mark.parametrize("name", CALLS)
def test_something_else_in_its_place_is_refused_with_what_to_give(folder: Path, name: str) -> None:
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call(DiffusionPipeline.from_pretrained(folder), folder)


# ---- load_pipeline and parallelize ---------------------------------------------------------------------------------


def test_a_partition_for_a_component_that_is_not_there_is_refused(folder: Path, two_ranks: ParallelConfig) -> None:
    config = ParallelConfig(pipeline_parallel_size=2, partition={"transfomer": "2,2"})
    with pytest.raises(ConfigError, match=r"partition=.* names 'transfomer'.*split are 'transformer'\."):
        load_pipeline(folder, config)
    with pytest.raises(ConfigError, match=r"partition=.* names 'transfomer'.*split are 'transformer'\."):
        parallelize(DiffusionPipeline.from_pretrained(folder), config)


@pytest.mark.parametrize(
    "argument",
    [
        dict(device_map="balanced"),
        dict(low_cpu_mem_usage=False),
        dict(max_memory={0: "1GB"}),
        dict(use_safetensors=False),
        dict(quantization_config=object()),
    ],
)
def test_an_argument_that_contradicts_the_split_is_refused(
    folder: Path, two_ranks: ParallelConfig, argument: Any
) -> None:
    with pytest.raises(ConfigError, match=next(iter(argument))):
        load_pipeline(folder, two_ranks, **argument)


def test_a_vae_in_the_transformers_place_is_refused(folder: Path, two_ranks: ParallelConfig) -> None:
    with pytest.raises(NotATransformerError, match="transformer=AutoencoderKL"):
        load_pipeline(folder, two_ranks, transformer=small_vae())


def in_the_cache_of_the_hub(cache: Path, names: dict[str, Path]) -> None:
    """Folders as revisions of `tests/wan`, as the hub's client keeps them."""
    root = cache / "models--tests--wan"
    for index, (revision, folder) in enumerate(names.items()):
        commit = f"{index + 1}" * 40
        shutil.copytree(folder, root / "snapshots" / commit)
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / revision).write_text(commit)


def generate_from_the_hub(cache: Path) -> dict[str, torch.Tensor]:
    config = ParallelConfig(pipeline_parallel_size=2)
    options: dict[str, Any] = dict(cache_dir=str(cache), local_files_only=True)
    return {
        str(revision): load_pipeline("tests/wan", config, revision=revision, **options)(**seeded()).frames
        for revision in (None, "older")
    }


def seeded() -> dict[str, Any]:
    return dict(CALL, generator=torch.Generator().manual_seed(0))


def test_a_hub_id_is_loaded_from_the_cache_by_its_revision(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    older = checkpoints.wan(tmp_path / "older", seed=1)
    in_the_cache_of_the_hub(tmp_path / "cache", {"main": folder, "older": older})
    expected = {
        name: DiffusionPipeline.from_pretrained(own)(**seeded()).frames
        for name, own in (("None", folder), ("older", older))
    }
    for found in ranks.run(2, generate_from_the_hub, tmp_path / "cache"):
        assert_same(found, expected)


def test_a_hub_id_that_is_not_there_is_refused(tmp_path: Path, two_ranks: ParallelConfig) -> None:
    with pytest.raises(ModelNotFoundError, match="'tests/wan' is neither a folder nor a hub id that can be") as caught:
        load_pipeline("tests/wan", two_ranks, cache_dir=str(tmp_path), local_files_only=True)
    assert caught.value.__suppress_context__, "the hub's own errors, a page of them, say nothing more"


def test_a_variant_that_no_component_has_is_refused(folder: Path, two_ranks: ParallelConfig) -> None:
    with pytest.raises(CheckpointError, match="no files of the variant 'fp8'"):
        load_pipeline(folder, two_ranks, variant="fp8")


def test_a_variant_holds_for_the_components_that_have_it(tmp_path: Path) -> None:
    folder = checkpoints.wan(tmp_path / "wan")
    AutoencoderKLWan.from_pretrained(folder / "vae").save_pretrained(folder / "vae", variant="fp16")
    plain = empty_transformers(folder, None, "fp16")["transformer"].checkpoint
    assert not any(".fp16" in path.name for path in plain.files.values())
    transformer = WanTransformer3DModel.from_pretrained(folder / "transformer")
    transformer.save_pretrained(folder / "transformer", variant="fp16")
    half = empty_transformers(folder, None, "fp16")["transformer"].checkpoint
    assert all(".fp16" in path.name for path in half.files.values())


def test_a_tensor_of_another_shape_is_named_before_ranks_meet(tmp_path: Path, two_ranks: ParallelConfig) -> None:
    folder = checkpoints.wan(tmp_path / "wan")
    file = sorted((folder / "transformer").glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    save_file({**tensors, name: tensors[name][:-1].clone()}, file)
    with pytest.raises(CheckpointError, match=rf"other shapes for 1 tensor: {name} "):
        load_pipeline(folder, two_ranks)


def load_with_own_transformer(folder: Path, own: Path) -> torch.Tensor:
    transformer = WanTransformer3DModel.from_pretrained(own / "transformer")
    warned = io.StringIO()
    handler = logging.StreamHandler(warned)
    logging.getLogger("diffusers").addHandler(handler)
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=2), transformer=transformer)
    logging.getLogger("diffusers").removeHandler(handler)
    assert warned.getvalue() == ""
    assert pipeline.transformer is transformer
    frames: torch.Tensor = pipeline(**CALL, generator=torch.Generator().manual_seed(0)).frames
    return frames


def test_a_transformer_in_memory_is_split_instead_of_the_folders(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    own = checkpoints.wan(tmp_path / "own", seed=3)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    of_folder = pipeline(**CALL, generator=torch.Generator().manual_seed(0)).frames
    pipeline.transformer = WanTransformer3DModel.from_pretrained(own / "transformer")
    expected = pipeline(**CALL, generator=torch.Generator().manual_seed(0)).frames
    assert not torch.equal(of_folder, expected)
    without = tmp_path / "without"
    pipeline.save_pretrained(without)
    for weights in (without / "transformer").iterdir():
        weights.unlink()
    for source in (folder, without):
        for frames in ranks.run(2, load_with_own_transformer, source, own):
            assert_same(frames, expected)


def names_of_sources(folder: Path, size: int) -> dict[str, Any]:
    pipeline = load_pipeline(folder, ParallelConfig(pipeline_parallel_size=size))
    return sources(pipeline)


def sources(pipeline: Any) -> dict[str, Any]:
    found = {"pipeline": pipeline.config._name_or_path, "itself": pipeline.name_or_path}
    for name, component in pipeline.components.items():
        config = getattr(component, "config", None)
        named = [getattr(component, "name_or_path", None), getattr(config, "_name_or_path", None)]
        found[name] = [str(value) if value is not None else None for value in named]
    return found


def test_a_pipeline_says_which_folder_it_comes_from(ranks: RankPool, folder: Path) -> None:
    expected = sources(DiffusionPipeline.from_pretrained(str(folder)))
    assert expected["pipeline"] == str(folder)
    assert names_of_sources(folder, 1) == expected
    assert ranks.run(2, names_of_sources, folder, 2) == [expected] * 2


def test_show_and_load_agree_which_components_are_split(tmp_path: Path) -> None:
    config = {"_class_name": "WanTransformer3DModel", **CASES["WanTransformer3D"].init}
    index = {
        "_class_name": "OwnPipeline",
        "transformer": ["diffusers", "AutoencoderKLWan"],
        "denoiser": ["diffusers", "WanTransformer3DModel"],
        "transformer_of_text": ["transformers", "T5EncoderModel"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    WanTransformer3DModel(**CASES["WanTransformer3D"].init).save_pretrained(tmp_path / "denoiser")
    (tmp_path / "denoiser" / "config.json").write_text(json.dumps(config))
    assert [spec.names for spec in find_model(str(tmp_path)).transformers] == [("denoiser",)]
    assert list(empty_transformers(tmp_path, None)) == ["denoiser"]


def test_both_names_of_the_dtype_at_once_are_refused(folder: Path, two_ranks: ParallelConfig) -> None:
    with pytest.raises(ConfigError, match="two names of one argument"):
        load_pipeline(folder, two_ranks, dtype=torch.bfloat16, torch_dtype=torch.float16)


# ---- profiles ------------------------------------------------------------------------------------------------------


def test_measured_seconds_decide_where_to_cut(tmp_path: Path) -> None:
    model, inputs = (
        build_model(CASES["FluxTransformer@guidance-batch"]),
        build_inputs(CASES["FluxTransformer@guidance-batch"]),
    )
    double, single = len(model.transformer_blocks), len(model.single_transformer_blocks)
    profile = MeasuredProfile(
        model="flux",
        model_class="FluxTransformer2DModel",
        device="cpu",
        dtype="float32",
        blocks={"FluxTransformerBlock": Measured(float(single)), "FluxSingleTransformerBlock": Measured(float(double))},
        prologue=Measured(0.0),
        epilogue=Measured(0.0),
    )
    profile.save(tmp_path / "profile.json")
    # So that all double blocks take as long as all single ones.
    assert split_model(model, 2, inputs, profile=tmp_path / "profile.json").partition.counts == (double, single)
    assert split_model(model, 2, inputs, profile=profile).partition.counts == (double, single)


def test_a_card_twice_as_fast_with_more_memory_gets_more_blocks() -> None:
    case = CASES["WanTransformer3D@batch"]
    model, inputs = build_model(case), build_inputs(case)
    equal = split_model(model, 2, inputs)
    uneven = split_model(model, 2, inputs, ranks="24GB*3,16GB")
    assert uneven.partition.counts[0] > equal.partition.counts[0]
    assert uneven.cut is not None
    assert [rank.speed for rank in uneven.cut.ranks] == [3.0, 1.0]


def test_a_model_that_does_not_fit_says_so_before_it_runs() -> None:
    case = CASES["WanTransformer3D@batch"]
    model, inputs = build_model(case), build_inputs(case)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with pytest.raises(DoesNotFitError, match="rank 0 lacks"):
        split_model(model, 2, inputs, ranks=[RankSpec(memory_bytes=size // 8)] * 2)


def test_a_pipeline_that_cannot_fit_says_so_before_anything_is_loaded(folder: Path, two_ranks: ParallelConfig) -> None:
    with pytest.raises(DoesNotFitError, match="rank 0 lacks"):
        load_pipeline(folder, replace(two_ranks, ranks=[RankSpec(memory_bytes=1000)] * 2))


def test_a_text_encoder_takes_memory_of_its_rank() -> None:
    case = CASES["WanTransformer3D@batch"]
    model, inputs = build_model(case), build_inputs(case)
    ranks = [RankSpec(memory_bytes=10**9), RankSpec(memory_bytes=3 * 10**9)]
    encoder = Component("text_encoder", bytes=2 * 10**9)
    with pytest.raises(DoesNotFitError, match="rank 0 lacks"):
        split_model(model, 2, inputs, ranks=ranks, components=[encoder])
    split = split_model(model, 2, inputs, ranks=ranks, components=[encoder], partitioner="vae-aware")
    assert split.cut is not None
    assert split.cut.owners == {"text_encoder": 1}


def test_an_unknown_profile_is_refused_before_anything_is_loaded(folder: Path, two_ranks: ParallelConfig) -> None:
    with pytest.raises(ConfigError, match="neither a profile"):
        load_pipeline(folder, replace(two_ranks, profile="fast-gpu"))
    case = CASES["WanTransformer3D@batch"]
    with pytest.raises(ConfigError, match="neither a profile"):
        split_model(build_model(case), 2, build_inputs(case), profile="fast-gpu")


@pytest.mark.parametrize("name", ["flux.1-dev", "Wan2.1-T2V-1.3B"])
def test_a_presets_name_is_answered_with_the_id_of_its_weights(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="is a preset") as refusal:
        load_pipeline(name, ParallelConfig(pipeline_parallel_size=2))
    assert repr(preset(name).hf_repo) in str(refusal.value)


def test_a_hub_id_that_cannot_be_reached_is_compared_with_those_of_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no such repository")

    monkeypatch.setattr(DiffusionPipeline, "download", unreachable)
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'black-forest-labs/FLUX\.1-dev'"):
        load_pipeline("black-forest-labs/FLUX.1-devv")
    with pytest.raises(ModelNotFoundError) as refusal:
        load_pipeline("someone/quite-another-thing-xyz")
    assert "Did you mean" not in str(refusal.value)


def test_a_folder_of_a_presets_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flux.1-dev").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"has no model_index\.json"):
        load_pipeline("flux.1-dev")
