"""`dit-pipelining show`: what it predicts, compares and writes."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from safetensors.torch import load_file

from dit_pipelining.cli import main
from dit_pipelining.costs.measured import Measured, MeasuredProfile
from dit_pipelining.planning.presets import preset
from tests.zoo import CASES

TINY_WAN = Path(__file__).parents[2] / "recipes" / "tiny_wan"


def predicted(data):
    return data["transformers"][0]["predicted"]


def test_a_preset_brings_its_steps_guidance_and_components(show):
    data = show("flux.1-schnell", "--stages", 2)
    known = preset("flux.1-schnell")
    load = predicted(data)
    assert (load["steps"], load["calls_per_step"]) == (known.defaults["steps"], 1)
    assert data["target"]["devices"] == ["h200", "h200"]
    assert data["ranks"][0]["memory"]["encoders"] == 2 * sum(e["parameters"] for e in known.text_encoders)
    assert data["ranks"][1]["memory"]["vae"] == 2 * known.vae["parameters"]
    assert load["decode_seconds"] > 0
    stages = load["stage_seconds"]
    assert load["step_seconds"] == pytest.approx(
        sum(stages) + sum(load["transfer_seconds"]) + load["result_seconds"], rel=0.01
    )
    assert load["bubble"] == pytest.approx(0.5, abs=0.03)
    assert sum(block["seconds"] for block in data["transformers"][0]["blocks"]) == pytest.approx(sum(stages), rel=0.02)


def test_flags_of_the_recipes_are_understood(show, tiny):
    data = show(
        tiny, "--pipeline-parallel-size", 2, "--cfg-parallel-size", 2, "--num-inference-steps", 7, "--cfg", "two-calls"
    )
    load = predicted(data)
    assert (data["num_stages"], load["replicas"], load["steps"], load["calls_per_step"]) == (2, 2, 7, 2)
    assert len(load["utilisation"]) == 4


def test_requests_side_by_side_fill_the_bubble(show, tiny):
    alone = predicted(show(tiny, "--stages", 4, "--steps", 10, "--cfg", "none"))
    many = predicted(show(tiny, "--stages", 4, "--steps", 10, "--cfg", "none", "--requests", 8))
    flushed = predicted(
        show(tiny, "--stages", 4, "--steps", 10, "--cfg", "none", "--requests", 8, "--schedule", "gpipe")
    )
    assert alone["bubble"] > 0.7 > 0.5 > flushed["bubble"] > many["bubble"]


def test_both_branches_in_a_batch_are_captured_as_one(show, tiny):
    one = show(tiny, "--stages", 2)
    both = show(tiny, "--stages", 2, "--cfg", "batched")
    assert (one["size"]["batch"], both["size"]["batch"]) == (1, 2)
    assert both["transformers"][0]["flops"] == 2 * one["transformers"][0]["flops"]
    spread = show(tiny, "--stages", 2, "--cfg", "batched", "--cfg-parallel-size", 2)
    assert (spread["size"]["batch"], predicted(spread)["calls_per_step"]) == (1, 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_have_the_dtype_that_was_asked_for(show, tiny, dtype):
    data = show(tiny, "--stages", 2, "--dtype", dtype)
    (hidden,) = [value for value in data["transformers"][0]["boundaries"][0]["tensors"] if "blocks" in value["origin"]]
    assert hidden["dtype"] == dtype
    size = 4 if dtype == "float32" else 2
    kept = data["transformers"][0]["parameter_bytes"] / data["transformers"][0]["parameters"]
    assert size <= kept < size + 0.6  # Wan keeps its norms and time embedder in float32


def test_a_slower_link_takes_longer(show, tiny):
    fast = predicted(show(tiny, "--partition", "2,2", "--stages", 2, "--device", "h200", "--link", "nvlink"))
    slow = predicted(show(tiny, "--partition", "2,2", "--stages", 2, "--device", "h200", "--link", "ethernet"))
    assert slow["transfer_seconds"][0] > 5 * fast["transfer_seconds"][0]
    assert slow["stage_seconds"] == fast["stage_seconds"]


def test_seconds_come_from_a_measured_profile(show, tiny, tmp_path):
    blocks = {"WanTransformerBlock": Measured(0.5)}
    file = tmp_path / "profile.json"
    profile = MeasuredProfile(
        "x", "WanTransformer3DModel", "NVIDIA A100-SXM4-80GB", "bfloat16", blocks, Measured(0.25), Measured(0.125)
    )
    profile.save(file)
    data = show(tiny, "--stages", 2, "--partition", "1,3", "--profile", file)
    assert predicted(data)["stage_seconds"] == pytest.approx([0.75, 1.625], rel=1e-3)
    assert data["target"]["devices"] == ["a100", "a100"]
    assert "NVIDIA A100" in data["target"]["source"]


def test_cuts_are_compared_with_what_decided_left_out(show, monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "10,30,10,7")
    data = show("flux.1-dev", "--stages", 4, "--compare", "uniform,balanced,vae-aware")
    assert data["transformers"][0]["partition"] == [10, 30, 10, 7]
    uniform, balanced, aware = data["alternatives"]
    assert uniform["counts"] == [[14, 14, 15, 14]]
    assert balanced["slowest_seconds"] <= uniform["slowest_seconds"] < max(predicted(data)["stage_seconds"])
    assert aware["makespan"] <= balanced["makespan"] * 1.01


def test_a_cut_that_does_not_fit_is_compared_by_what_is_wrong(show):
    data = show(
        "flux.1-dev", "--stages", 2, "--ranks", "24GB", "--partitioner", "uniform", "--compare", "balanced,uniform"
    )
    fits = {other["name"]: not other["problem"] for other in data["alternatives"]}
    assert fits["uniform"]
    assert [rank["shortfall"] > 0 for rank in data["ranks"]] == [
        rank["memory"]["total"] > limit for rank, limit in zip(data["ranks"], data["target"]["limits"], strict=True)
    ]


def test_files_are_written_beside_the_tables(capsys, tiny, tmp_path):
    files = {name: tmp_path / f"out.{name}" for name in ("json", "svg", "html", "trace")}
    arguments = [f"--{name}={file}" for name, file in files.items()]
    assert main(["show", str(tiny), "--stages", "2", "--requests", "2", "--steps", "3", *arguments]) == 0
    printed = capsys.readouterr().out
    for words in ("memory of each rank", "predicted", "timeline", "bubble", "request 1"):
        assert words in printed
    assert json.loads(files["json"].read_text())["num_stages"] == 2
    assert ElementTree.fromstring(files["svg"].read_text()).tag.endswith("svg")
    assert files["html"].read_text().startswith("<!doctype html>")
    assert json.loads(files["trace"].read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "toaster"], "there is no device 'toaster'"),
        (["--device", "h200", "--ranks", "h200,h200"], "--device and --ranks"),
        (["--device", "rtx4090", "--link", "nvlink"], "has no nvlink"),
        (["--compare", "uniform,magic"], "'magic': expected some of"),
        (["--html", "/no/such/folder/x.html"], "there is no folder /no/such/folder"),
        (["--profile", "no_such_profile.json"], "no_such_profile.json"),
        (["--schedule", "gpipe", "--cfg-parallel-size", "2"], "gpipe"),
        (["--dtype", "int8"], "int8"),
        (["--requests", "1000000"], "more than is simulated; use --requests 2500 or less"),
        (["--ranks", ""], "the rank '' is nothing known"),
        (["--json", "."], ". is a folder"),
        (["--ulysses-degree", "3"], "2 heads do not divide by ulysses x tensor = 3"),
        (
            ["--text-encoder-tp-size", "2"],
            "the text encoders of this pipeline that are not on every rank are none",
        ),
        (["--vae-patch-parallel-size", "2"], "vae_patch_parallel_size=2: this pipeline has no VAE on one rank"),
        (["--vae-patch-parallel-size", "3"], "vae_patch_parallel_size=3: 2 ranks at most can run a call together"),
        (["--hsdp-shard-size", "2"], "hsdp_shard_size=2 is given, but use_hsdp is not"),
    ],
)
def test_a_users_error_is_one_line(capsys, tiny, arguments, named):
    assert main(["show", str(tiny), "--stages", "2", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert named in printed.err


def test_profile_measures_a_model_and_show_reads_it(capsys, tiny, tmp_path, show):
    file = tmp_path / "profile.json"
    arguments = ["--height", "16", "--width", "16", "--num-frames", "5", "--dtype", "float32"]
    assert main(["profile", str(tiny), "--device", "cpu", "--output", str(file), *arguments]) == 0
    printed = capsys.readouterr()
    assert "block WanTransformerBlock" in printed.out
    assert "the VAE was not measured" in printed.err
    measured = json.loads(file.read_text())
    assert measured["size"] == {"height": 16, "width": 16, "frames": 5, "batch": 1}
    data = show(tiny, "--stages", 2, "--profile", file, *arguments)
    block = measured["blocks"]["WanTransformerBlock"]["seconds"]
    assert predicted(data)["stage_seconds"][1] == pytest.approx(2 * block + measured["epilogue"]["seconds"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "MODEL is missing"),
        (["mochi-1"], "--output is missing"),
        (["mochi-1", "--output", "/no/such/folder/p.json"], "there is no folder"),
        (["mochi-1", "--output", "p.json", "--device", "toaster"], "--device toaster"),
        (["mochi", "--output", "p.json"], "did you mean mochi-1"),
        (["mochi-1", "--output", "."], ". is a folder"),
    ],
)
def test_profile_refuses_what_it_cannot_do_in_one_line(capsys, arguments, named, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert named in printed.err
    assert not list(tmp_path.iterdir())


def test_profile_says_in_one_line_that_inputs_do_not_fit(capsys, tiny, tmp_path):
    described = tmp_path / "inputs.json"
    shapes = {"hidden_states": [1, 5, 1, 2, 2], "timestep": [1], "encoder_hidden_states": [1, 12, 32]}  # 16 channels
    inputs = {name: {"shape": shape, "dtype": "float32"} for name, shape in shapes.items()}
    described.write_text(json.dumps(inputs))
    file = tmp_path / "p.json"
    arguments = ["--inputs", str(described), "--output", str(file), "--device", "cpu"]
    assert main(["profile", str(tiny), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "the forward of WanTransformer3DModel fails on these inputs" in printed.err
    assert not file.exists()


def test_a_local_pipelines_components_are_counted(show):
    """Against what lies in its files: they hold float32, and bfloat16 is asked for."""
    stored = {
        name: sum(math.prod(tensor.shape) for tensor in load_file(file).values())
        for name in ("text_encoder", "vae")
        for file in (TINY_WAN / name).glob("*.safetensors")
    }
    first, last = show(TINY_WAN, "--stages", 2)["ranks"]
    assert (first["memory"]["encoders"], first["memory"]["vae"]) == (2 * stored["text_encoder"], 0)
    assert (last["memory"]["encoders"], last["memory"]["vae"]) == (0, 2 * stored["vae"])


def test_tiles_of_the_vae_take_less_on_each_of_their_ranks(show):
    load = (TINY_WAN, "--stages", 2, "--partition", "6,6", "--steps", 2)
    alone, shared = show(*load), show(*load, "--vae-patch-parallel-size", 2)
    held = alone["ranks"][1]["memory"]["vae"]
    assert [rank["memory"]["vae"] for rank in shared["ranks"]] == [held, held]
    assert predicted(shared)["decode_seconds"] < predicted(alone)["decode_seconds"]
    assert [decode["ranks"] for decode in predicted(shared)["decodes"]] == [[1, 0]]
    assert shared["ranks"][1]["memory"]["activations"] < alone["ranks"][1]["memory"]["activations"]


def test_a_file_says_what_flags_leave_out(show, tmp_path, capsys):
    file = tmp_path / "ranks.yaml"
    file.write_text("{pipeline_parallel_size: 3, component_ranks: {vae: 0}, partition: [2, 2, 8]}")
    data = show(TINY_WAN, "--stages", 2, "--partition", "4,8", "--config", file)
    assert data["transformers"][0]["partition"] == [4, 8]
    assert [rank["memory"]["vae"] > 0 for rank in data["ranks"]] == [True, False]
    file.write_text("microbatches: 2")
    assert main(["show", str(TINY_WAN), "--config", str(file)]) == 2
    assert "microbatches=2 is not simulated; leave it out" in capsys.readouterr().err


def test_ranks_that_share_stages_are_faster_and_hold_less(show, tiny):
    load = ("--stages", 2, "--partition", "2,2", "--steps", 2)
    alone, shared = show(tiny, *load), show(tiny, *load, "--ulysses-degree", 2, "--data-parallel-size", 2)
    assert max(predicted(shared)["stage_seconds"]) < max(predicted(alone)["stage_seconds"])
    assert predicted(shared)["transfer_seconds"][0] < predicted(alone)["transfer_seconds"][0]
    assert (shared["degrees"]["ulysses"], shared["degrees"]["data"]) == (2, 2)
    for one, other in zip(shared["ranks"], alone["ranks"], strict=True):
        assert one["memory"]["activations"] < other["memory"]["activations"]
        assert one["memory"]["weights"] == other["memory"]["weights"]


def test_ranks_of_a_stage_are_one_row(tiny, capsys):
    assert main(["show", str(tiny), "--stages", "2", "--ring-degree", "2"]) == 0
    printed = capsys.readouterr().out
    assert "\n  0-1 " in printed
    assert "\n  2-3 " in printed
    assert "each stage on 2 ranks" in printed


@pytest.mark.parametrize("gpus", [2, 8])
@pytest.mark.parametrize("goal", ["latency", "memory"])
def test_a_search_ranks_every_way_and_says_why(show, tiny, gpus, goal):
    data = show(
        tiny, "--search", "--gpus", gpus, "--goal", goal, "--device", "h100", "--steps", 3, "--cfg", "two-calls"
    )
    assert (data["goal"], data["gpus"]) == (goal, gpus)
    key = {"latency": "latency", "memory": "memory_bytes"}[goal]
    values = [way[key] for way in data["ways"]]
    assert values == sorted(values)
    for way in data["ways"]:
        sizes = way["degrees"]
        assert (
            sizes["data"] * sizes["cfg"] * sizes["pipeline"] * sizes["ring"] * sizes["ulysses"] * sizes["tensor"]
            == gpus
        )
        assert "computes" in way["why"]
    reasons = {entry["reason"] for entry in data["refused"]}
    assert any("heads do not divide" in reason for reason in reasons) == (gpus == 8)  # it has 2 heads


@pytest.mark.parametrize(
    ("name", "dimensions", "refused"),
    [
        ("PixArtTransformer2D", ("ring", "ulysses"), "no plan for splitting its tokens"),
        ("Flux2Transformer", (), "heads do not divide"),  # it can be divided by both, and has two heads
    ],
)
def test_a_search_proposes_nothing_that_is_refused(show, tmp_path, name, dimensions, refused):
    case = CASES[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"_class_name": case.model_class, **case.init}))
    data = show(file, "--search", "--gpus", 4, "--cfg", "two-calls")
    used = {name for way in data["ways"] for name, size in way["degrees"].items() if size > 1}
    assert used >= {"data", "cfg", "pipeline"}
    assert not used & set(dimensions)
    assert {"ring", "ulysses", "tensor"} - set(dimensions) <= used
    assert any(refused in entry["reason"] for entry in data["refused"])


def test_a_search_prints_flags_and_runners_up(tiny, capsys):
    assert main(["show", str(tiny), "--search", "--gpus", "2", "--runners-up", "2", "--cfg", "none"]) == 0
    printed = capsys.readouterr().out
    assert "best latency on 2 GPU(s): --" in printed
    assert [line.split()[0] for line in printed.splitlines()[2:5]] == ["1", "2", "3"]
    assert "way(s) cannot be: 2 replicas have 1 call(s) a step to share" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--search"], "--gpus is missing"),
        (["--search", "--gpus", "1000"], "--gpus 1000: 128 at most are searched"),
        (["--search", "--gpus", "2", "--stages", "2"], "--pipeline-parallel-size: of no use to --search"),
        (["--gpus", "2", "--stages", "2"], "--gpus belongs to --search"),
    ],
)
def test_flags_that_do_not_go_with_a_search_are_refused(tiny, capsys, flags, message):
    assert main(["show", str(tiny), *flags]) != 0
    assert message in capsys.readouterr().err
