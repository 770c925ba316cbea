"""What MODEL means, and what is derived from configs alone."""

import json

import pytest
import torch

from dit_pipelining.errors import ConfigError, InputError, ModelNotFoundError, NotATransformerError
from dit_pipelining.planning.models import SizeRequest, find_model, model_inputs
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.weightless import build_weightless, transformer_class
from tests.zoo import CASES


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def tiny_wan(**changes):
    return {"_class_name": "WanTransformer3DModel", **CASES["WanTransformer3D"].init, **changes}


def inputs_of(name, **asked):
    model = find_model(str(name))
    return model_inputs(model, model.transformers[0], SizeRequest(**asked))


@pytest.fixture
def pipeline(tmp_path):
    """A folder of Wan 2.2's kind with two small transformers, without weights."""
    classes = {name: ["diffusers", "WanTransformer3DModel"] for name in ("transformer", "transformer_2")}
    index = {"_class_name": "WanPipeline", "boundary_ratio": 0.9, "vae": ["diffusers", "AutoencoderKLWan"]} | classes
    write(tmp_path / "model_index.json", index)
    write(tmp_path / "vae" / "config.json", dict(scale_factor_spatial=16, scale_factor_temporal=8))
    for name in classes:
        write(tmp_path / name / "config.json", tiny_wan())
    return tmp_path


def test_transformers_that_are_alike_are_one_entry(pipeline):
    model = find_model(str(pipeline))
    assert model.source == "pipeline"
    assert [spec.names for spec in model.transformers] == [("transformer", "transformer_2")]
    write(pipeline / "transformer_2" / "config.json", tiny_wan(num_layers=6))
    assert [spec.names for spec in find_model(str(pipeline)).transformers] == [("transformer",), ("transformer_2",)]


def test_an_absent_second_transformer_is_left_out(pipeline):
    index = json.loads((pipeline / "model_index.json").read_text())
    write(pipeline / "model_index.json", index | {"transformer_2": [None, None]})
    assert [spec.names for spec in find_model(str(pipeline)).transformers] == [("transformer",)]


def test_the_vae_of_the_folder_scales_the_latents(pipeline):
    described, size = inputs_of(pipeline, height=64, width=96, frames=17, batch=2)
    assert size == Size(64, 96, 17, 2)
    assert described["hidden_states"]["shape"] == [2, 4, 3, 4, 6]
    assert described["encoder_hidden_states"]["shape"] == [2, 512, 16]


def test_a_pipeline_says_whether_every_token_has_a_timestep(pipeline):
    assert inputs_of(pipeline)[0]["timestep"]["shape"] == [1]
    index = json.loads((pipeline / "model_index.json").read_text())
    write(pipeline / "model_index.json", index | {"expand_timesteps": True})
    assert inputs_of(pipeline, height=64, width=64, frames=17)[0]["timestep"]["shape"] == [1, 3 * 2 * 2]


def test_a_config_alone_takes_the_vae_of_its_nearest_preset(tmp_path):
    file = write(tmp_path / "config.json", tiny_wan(image_dim=20, added_kv_proj_dim=24, in_channels=12))
    described, _ = inputs_of(file, height=32, width=64, frames=9)
    assert described["hidden_states"]["shape"] == [1, 12, 3, 4, 8]
    assert described["encoder_hidden_states_image"]["shape"] == [1, 257, 20]


def test_the_default_size_fits_the_configs_position_tables(tmp_path):
    file = write(tmp_path / "config.json", tiny_wan(rope_max_seq_len=8))
    _, size = inputs_of(file)
    assert (size.height, size.width, size.frames) == (128, 128, 29)
    with pytest.raises(InputError, match="at most 128"):
        inputs_of(file, height=144)
    with pytest.raises(InputError, match="at most 29"):
        inputs_of(file, frames=33)


def test_sizes_scale_the_inputs_of_a_preset():
    described, size = inputs_of("flux.1-dev", height=512, width=768, batch=2)
    assert size == Size(512, 768, 1, 2)
    assert described["hidden_states"]["shape"] == [2, 32 * 48, 64]
    assert described["img_ids"]["shape"] == [32 * 48, 3]


def test_a_size_that_is_not_made_of_whole_tokens_is_refused():
    with pytest.raises(InputError, match="height 500 is not a multiple of 16 pixels; use 496"):
        inputs_of("wan2.1-t2v-1.3b", height=500)


def test_frames_are_refused_by_a_model_that_makes_images():
    with pytest.raises(InputError, match="makes images"):
        inputs_of("flux.1-dev", frames=81)


def test_a_class_without_a_recipe_names_the_inputs_to_describe(tmp_path):
    file = write(tmp_path / "config.json", {"_class_name": "WanVACETransformer3DModel"})
    with pytest.raises(
        InputError, match=r"hidden_states, timestep, encoder_hidden_states and perhaps .*control_hidden_states"
    ):
        inputs_of(file)


@pytest.mark.parametrize(
    ("content", "error", "named"),
    [
        ("{", ConfigError, "no readable JSON"),
        ("[]", ConfigError, "holds a list"),
        ({"num_layers": 2}, ConfigError, "_class_name"),
        ({"_class_name": "AutoencoderKL"}, NotATransformerError, "AutoencoderKL is not a transformer"),
        ({"_class_name": "UNet2DConditionModel"}, NotATransformerError, "is not a transformer"),
        ({"_class_name": "SoonToComeTransformer"}, NotATransformerError, "has no class 'SoonToComeTransformer'"),
    ],
)
def test_a_config_that_is_no_transformers_is_refused(tmp_path, content, error, named):
    with pytest.raises(error, match=named):
        find_model(str(write(tmp_path / "config.json", content)))


def test_a_pipeline_without_a_transformer_says_what_it_has(tmp_path):
    write(tmp_path / "model_index.json", {"_class_name": "OldPipeline", "unet": ["diffusers", "UNet2DConditionModel"]})
    with pytest.raises(NotATransformerError, match=r"OldPipeline.*unet \(UNet2DConditionModel\)"):
        find_model(str(tmp_path))


def test_what_is_not_there_is_refused(tmp_path, pipeline):
    with pytest.raises(ModelNotFoundError, match=r"no preset, folder or config file; did you mean flux\.1-dev"):
        find_model("flux.1-devel")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="neither model_index"):
        find_model(str(tmp_path / "empty"))
    (pipeline / "transformer_2" / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"transformer_2.config\.json is missing"):
        find_model(str(pipeline))


def test_weightless_parameters_have_the_dtypes_of_from_pretrained(tmp_path):
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(**CASES["WanTransformer3D"].init)
    model.save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    weightless = build_weightless(WanTransformer3DModel, model.config)
    assert all(parameter.is_meta for parameter in weightless.parameters())
    expected = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert {name: parameter.dtype for name, parameter in weightless.named_parameters()} == expected
    assert set(expected.values()) == {torch.float32, torch.bfloat16}


def test_a_config_that_its_class_cannot_be_built_from_is_refused():
    config = dict(CASES["WanTransformer3D"].init, num_layers="four")
    with pytest.raises(ConfigError, match="WanTransformer3DModel cannot be built"):
        build_weightless(transformer_class("WanTransformer3DModel"), config)
