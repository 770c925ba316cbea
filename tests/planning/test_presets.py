"""The presets are complete, load, and agree with the classes of the installed diffusers."""

import subprocess
import sys

import pytest

from dit_pipelining.capture.capturing import capture
from dit_pipelining.errors import ModelNotFoundError
from dit_pipelining.planning.inputs import build_inputs
from dit_pipelining.planning.models import SizeRequest, find_model, model_inputs
from dit_pipelining.planning.presets import preset, preset_names, presets_of
from dit_pipelining.planning.weightless import build_weightless, transformer_class

NAMES = [
    "allegro",
    "auraflow",
    "chroma",
    "cogvideox-2b",
    "cogvideox-5b",
    "cogview4-6b",
    "dit-xl-2-256",
    "flux.1-dev",
    "flux.1-schnell",
    "flux.2-dev",
    "hidream-i1-full",
    "hunyuandit-1.2",
    "hunyuanvideo",
    "hunyuanvideo-1.5",
    "latte-1",
    "ltx-video-2b",
    "lumina2",
    "mochi-1",
    "pixart-sigma-1024",
    "qwen-image",
    "sana-1600m",
    "sd3-medium",
    "sd3.5-large",
    "skyreels-v2-14b",
    "wan2.1-i2v-14b-480p",
    "wan2.1-t2v-1.3b",
    "wan2.1-t2v-14b",
    "wan2.2-i2v-a14b",
    "wan2.2-t2v-a14b",
    "wan2.2-ti2v-5b",
    "z-image-turbo",
]


def test_all_published_models_have_a_preset():
    assert list(preset_names()) == NAMES
    assert len(NAMES) == 31


@pytest.mark.parametrize("name", NAMES)
def test_a_presets_class_has_its_parameters_and_blocks(name):
    known = preset(name)
    model = build_weightless(transformer_class(known.model_class), known.config)
    assert sum(parameter.numel() for parameter in model.parameters()) == known.parameters
    assert {name: len(model.get_submodule(name)) for name in known.blocks} == known.blocks
    assert tuple(getattr(model, "_keep_in_fp32_modules", None) or ()) == known.keep_in_fp32


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_gives_what_the_pipeline_was_recorded_to_pass(name):
    model = find_model(name)
    spec = model.transformers[0]
    described, _ = model_inputs(model, spec, SizeRequest(batch=1))
    assert described == preset(name).inputs


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_preset_has_the_flops_of_its_eager_forward(name):
    known = preset(name)
    model = build_weightless(transformer_class(known.model_class), known.config)
    graph = capture(model, build_inputs(known.inputs), count_work=True)
    assert sum(node.meta.get("flops", 0) for node in graph.nodes) == known.flops
    assert len(graph.blocks) + len(graph.side_blocks) >= sum(known.blocks.values())


def test_an_unknown_name_lists_near_matches():
    with pytest.raises(ModelNotFoundError, match=r"wan2\.2-t2v-a14"):
        preset("wan2.2-t2v-14b")


def test_a_preset_is_found_by_its_repository_and_in_capitals():
    assert preset("black-forest-labs/FLUX.1-dev") is preset("flux.1-dev") is preset("FLUX.1-dev")


def test_presets_of_one_class():
    assert [known.name for known in presets_of("FluxTransformer2DModel")] == ["flux.1-dev", "flux.1-schnell"]
    assert presets_of("NoSuchModel") == []


def test_presets_are_read_without_torch():
    code = "import sys; from dit_pipelining.planning.presets import preset; preset('mochi-1'); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
