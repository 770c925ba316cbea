"""Components of a local folder, against those that diffusers loads from it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from dit_pipelining.costs.devices import find_device
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.beside import beside_model, beside_preset
from dit_pipelining.planning.components import components_of
from dit_pipelining.planning.models import find_model
from dit_pipelining.planning.presets import preset
from dit_pipelining.planning.recipes import Size

TINY_WAN = Path(__file__).parents[2] / "recipes" / "tiny_wan"
H200 = find_device("h200")


def weights(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """The configurations of a pipeline, without its weights."""
    shutil.copytree(TINY_WAN, tmp_path / "wan", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "wan"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_folders_components_have_the_bytes_that_are_loaded(configs: Path, dtype: torch.dtype) -> None:
    real = WanPipeline.from_pretrained(TINY_WAN, torch_dtype=dtype)
    known = beside_model(find_model(str(configs)))
    assert known is not None
    found = components_of(known, Size(32, 32, 5), dtype.itemsize, H200, None)
    assert found.held == {"text_encoder": weights(real.text_encoder), "vae": weights(real.vae)}
    assert found.seconds["vae"] > 0
    assert found.decode_bytes > 0


def test_a_folders_text_encoder_is_split_where_its_heads_divide(configs: Path) -> None:
    known = beside_model(find_model(str(configs / "model_index.json")))
    assert known is not None
    (encoder,) = known.encoders
    config = json.loads((configs / "text_encoder" / "config.json").read_text())
    assert encoder.plan(2).sizes()[-1] == config["num_heads"]
    with pytest.raises(ConfigError, match=r"'text_encoder': 3 does not divide the \d+ heads of .* in UMT5EncoderModel"):
        encoder.plan(3)


def test_a_vae_like_the_presets_does_what_the_preset_says(configs: Path) -> None:
    file = configs / "vae" / "config.json"
    file.write_text(json.dumps({"_class_name": "AutoencoderKLWan"}))
    published = beside_preset(preset("wan2.1-t2v-1.3b"))
    known = beside_model(find_model(str(configs)))
    assert known is not None
    assert (known.decoders, known.decode) == (published.decoders, published.decode)


def test_what_a_smaller_vae_does_is_counted(configs: Path) -> None:
    known = beside_model(find_model(str(configs)))
    published = beside_preset(preset("wan2.1-t2v-1.3b")).decode
    assert known is not None
    assert known.decode is not None
    assert published is not None
    assert known.decode.pixels == published.pixels
    assert 0 < known.decode.flops < published.flops / 50


def test_quantised_encoders_keep_their_bytes_in_every_dtype(tmp_path: Path) -> None:
    shutil.copytree(TINY_WAN, tmp_path / "wan")
    file = tmp_path / "wan" / "text_encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "torchao"}}))
    known = beside_model(find_model(str(tmp_path / "wan")))
    assert known is not None
    stored = (tmp_path / "wan" / "text_encoder" / "model.safetensors").stat().st_size
    assert {components_of(known, None, size, H200).held["text_encoder"] for size in (2, 4)} == {stored}
    with pytest.raises(ConfigError, match="stored quantised"):
        known.encoders[0].plan(2)


def test_components_that_are_not_there_are_named(configs: Path) -> None:
    shutil.rmtree(configs / "text_encoder")
    known = beside_model(find_model(str(configs)))
    assert known is not None
    assert (known.missing, known.encoders) == (("text_encoder",), ())
    assert known.decoders["vae"] > 0


def test_a_config_that_makes_no_component_is_refused(configs: Path) -> None:
    (configs / "text_encoder" / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="text_encoder"):
        beside_model(find_model(str(configs)))
