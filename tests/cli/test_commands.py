"""The `dit-pipelining` command."""

import json
import subprocess
import sys

import pytest

import dit_pipelining
from dit_pipelining.cli import main
from dit_pipelining.planning.presets import preset, preset_names
from tests.zoo import CASES


def large(boundary):
    """Tensors of a boundary that are more than 1% of the largest one."""
    most = max(tensor["bytes"] for tensor in boundary["tensors"])
    return [tensor for tensor in boundary["tensors"] if tensor["bytes"] > most / 100]


def test_wan_14b_at_four_stages(show):
    data = show("wan2.2-t2v-a14b", "--stages", 4)
    (wan,) = data["transformers"]
    assert (data["model"], data["source"], data["num_stages"]) == ("wan2.2-t2v-a14b", "preset", 4)
    assert data["size"] == {"height": 720, "width": 1280, "frames": 81, "batch": 1}
    assert wan["names"] == ["transformer", "transformer_2"]
    assert wan["partition"] == [10, 10, 10, 10]
    assert wan["parameters"] == preset("wan2.2-t2v-a14b").parameters
    assert wan["flops"] == preset("wan2.2-t2v-a14b").flops
    block = 351_394_304
    time_projection = 5120 * 6 * 5120 + 6 * 5120
    stages = wan["stages"]
    assert [stage["blocks"] for stage in stages] == [[f"blocks {i}-{i + 9}"] for i in (0, 10, 20, 30)]
    assert all(10 * block < stage["parameters"] < 10.2 * block for stage in stages[1:])
    assert stages[0]["parameters"] - stages[1]["parameters"] > time_projection
    held = sum(stage["parameters"] for stage in stages)
    assert wan["extra_parameters"] == pytest.approx(held / wan["parameters"] - 1)
    assert wan["extra_parameters"] < 0.015
    assert sum(stage["flops_share"] for stage in stages) == pytest.approx(1)
    for boundary in wan["boundaries"]:
        (hidden_states,) = large(boundary)
        assert hidden_states["shape"] == [1, 75600, 5120]
        assert hidden_states["dtype"] == "bfloat16"
        assert hidden_states["bytes"] == 75600 * 5120 * 2
    assert [rank["parameters"] for rank in data["ranks"]] == [2 * stage["parameters"] for stage in stages]


def test_flux_sends_both_streams_from_a_double_stream_stage(show):
    (flux,) = show("flux.1-dev", "--stages", 2, "--partition", "10,47")["transformers"]
    assert flux["parameters"] == preset("flux.1-dev").parameters
    assert flux["stages"][1]["blocks"] == ["transformer_blocks 10-18", "single_transformer_blocks 0-37"]
    double, single = 339_831_296, 141_591_808
    assert flux["stages"][1]["parameters"] == pytest.approx(9 * double + 38 * single, rel=0.01)
    assert flux["extra_parameters"] < 0.001
    (boundary,) = flux["boundaries"]
    assert sorted(tensor["shape"] for tensor in large(boundary)) == [[1, 512, 3072], [1, 4096, 3072]]


def test_a_small_image_model_is_cut_in_halves(show):
    data = show("pixart-sigma-1024", "--stages", 2, "--height", 512, "--batch-size", 2)
    (pixart,) = data["transformers"]
    assert data["size"] == {"height": 512, "width": 1024, "frames": 1, "batch": 2}
    assert pixart["partition"] == [14, 14]
    (hidden_states,) = large(pixart["boundaries"][0])
    assert hidden_states["shape"] == [2, 32 * 64, 1152]


@pytest.mark.parametrize(
    "name",
    [
        "WanTransformer3D",
        "FluxTransformer",
        "SD3Transformer",
        "QwenImageTransformer",
        "HunyuanVideoTransformer",
        "CogVideoXTransformer",
        "LTXTransformer",
    ],
)
def test_a_folder_with_a_config_is_enough(show, tmp_path, name):
    case = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": case.model_class, **case.init}))
    data = show(tmp_path, "--stages", 2)
    (transformer,) = data["transformers"]
    assert data["source"] == "transformer"
    assert transformer["model_class"] == case.model_class
    assert transformer["parameters"] == sum(p.numel() for p in case.load_class()(**case.init).parameters())
    assert sum(transformer["partition"]) == case.init["num_layers"] + case.init.get("num_single_layers", 0)


def test_inputs_from_a_file_serve_a_class_without_a_recipe(show, tmp_path):
    case = CASES["WanVACETransformer3D"]
    config, inputs = tmp_path / "config.json", tmp_path / "inputs.json"
    config.write_text(json.dumps({"_class_name": case.model_class, **case.init}))
    shapes = dict(
        hidden_states=[1, 16, 2, 16, 16], encoder_hidden_states=[1, 12, 32], control_hidden_states=[1, 48, 2, 16, 16]
    )
    described = {name: {"shape": shape, "dtype": "bfloat16"} for name, shape in shapes.items()}
    described["timestep"] = {"shape": [1], "dtype": "int64"}
    inputs.write_text(json.dumps(described))
    data = show(config, "--stages", 2, "--inputs", inputs)
    assert data["size"] is None
    assert sum(data["transformers"][0]["partition"]) == 4


def test_what_decides_the_partition(show, tiny, monkeypatch):
    arguments = (tiny, "--stages", 3)
    assert show(*arguments, "--partitioner", "uniform")["transformers"][0]["partition"] == [1, 2, 1]
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,1,1")
    data = show(*arguments)
    assert data["transformers"][0]["partition"] == [2, 1, 1]
    assert data["decided_by"] == "VLLM_PP_LAYER_PARTITION=2,1,1"
    data = show(*arguments, "--partition", "1,1,2")
    assert data["transformers"][0]["partition"] == [1, 1, 2]
    assert data["decided_by"] == "--partition 1,1,2"


def test_the_table_names_stages_boundaries_and_copies(capsys):
    assert main(["show", "wan2.1-t2v-1.3b", "--stages", "2", "--partition", "20,10"]) == 0
    printed = capsys.readouterr().out
    for part in ("20: blocks 0-19", "10: blocks 20-29", "0 to 1", "blocks.19", "1x32760x1536", "66.7%", "33.3%"):
        assert part in printed
    assert "extra copies of parameters" in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["show", "--stages", "2"], "MODEL is missing"),
        (["show", "mochi-1"], "--stages is missing"),
        (["show", "mochi-1", "--stages", "0"], "'0' is not a positive integer"),
        (["show", "mochi-1", "--stages", "2", "--partitioner", "magic"], "magic"),
        (["show", "wan2.2", "--stages", "2"], "did you mean wan2.2-"),
        (["show", "wan", "--stages", "2"], "did you mean wan2.1-"),
        (["show", "", "--stages", "2"], "'' is no preset, folder or config file"),
        (["show", __file__, "--stages", "2"], "is no JSON file; give the folder"),
        (["doctor", "--height", "64"], "--height: about what a model needs; give the MODEL too"),
        (["show", "TINY", "--stages", "5"], "5 stages are more than the model's 4 blocks"),
        (["show", "TINY", "--stages", "2", "--partition", "a,b"], "'a' is not an integer"),
        (["show", "TINY", "--stages", "2", "--partition=-1,5"], "-1 is negative"),
        (["show", "TINY", "--stages", "2", "--partition", "1,1,2"], "expected 2, one per stage"),
        (["show", "TINY", "--stages", "2", "--partition", "2,3"], "they sum to 5; expected 4"),
        (["show", "dit-xl-2-256", "--stages", "2", "--height", "250"], "multiple of 16"),
        (["show", "dit-xl-2-256", "--stages", "2", "--height", "256", "--inputs", "x.json"], "leave out either"),
        (["show", "dit-xl-2-256", "--stages", "2", "--inputs", "no_such_file.json"], "no_such_file.json"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2(capsys, tiny, arguments, named):
    assert main([str(tiny) if argument == "TINY" else argument for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert named in printed.err


def test_inputs_that_the_forward_cannot_take_are_one_line(capsys, tmp_path):
    described = tmp_path / "inputs.json"
    inputs = dict(preset("dit-xl-2-256").inputs, hidden_states={"shape": [1, 5, 32, 32], "dtype": "bfloat16"})
    described.write_text(json.dumps(inputs))
    assert main(["show", "dit-xl-2-256", "--stages", "2", "--inputs", str(described)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "the forward of DiTTransformer2DModel fails on these inputs" in printed.err


def test_a_pipelines_two_transformers_share_the_ranks(show, tmp_path):
    case = CASES["WanTransformer3D"]
    index = {"_class_name": "WanPipeline"}
    for name, layers in (("transformer", 4), ("transformer_2", 6)):
        index[name] = ["diffusers", case.model_class]
        (tmp_path / name).mkdir()
        config = {"_class_name": case.model_class, **case.init, "num_layers": layers}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    data = show(tmp_path, "--stages", 2)
    assert [sum(transformer["partition"]) for transformer in data["transformers"]] == [4, 6]
    for rank in data["ranks"]:
        stages = [transformer["stages"][rank["rank"]] for transformer in data["transformers"]]
        assert rank["parameters"] == sum(stage["parameters"] for stage in stages)
        assert rank["parameter_bytes"] == sum(stage["parameter_bytes"] for stage in stages)


def test_the_list_has_every_preset(capsys):
    assert main(["show", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in preset_names())


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"dit-pipelining {dit_pipelining.__version__}"


def test_listing_presets_loads_no_torch():
    code = "import sys; from dit_pipelining.cli import main; main(['show', '--list']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"
