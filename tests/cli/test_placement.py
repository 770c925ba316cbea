"""`show` and `doctor` say of every rank the components that a run puts there."""

from pathlib import Path
from typing import Any

from torch import nn

from dit_pipelining.api import ParallelConfig, load_pipeline
from dit_pipelining.cli.capturing import once_each
from dit_pipelining.cli.study import Question, study
from dit_pipelining.planning.models import SizeRequest
from tests import checkpoints
from tests.distributed import RankPool

TINY_WAN = Path(__file__).parents[2] / "recipes" / "tiny_wan"

SMALL = SizeRequest(height=32, width=32)
STAGES = dict(pipeline_parallel_size=2)
REPLICAS = dict(pipeline_parallel_size=2, cfg_parallel_size=2)
INSIDE = dict(pipeline_parallel_size=2, ulysses_degree=2)
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "wan": [
        REPLICAS,
        dict(**REPLICAS, component_ranks={"vae": 0, "text_encoder": 2}, vae_placement="shared"),
        dict(**REPLICAS, output_ranks=[1], vae_patch_parallel_size=2),
        dict(**INSIDE, component_ranks={"vae": "all"}, text_encoder_tp_size=2),
        dict(**STAGES, data_parallel_size=2, partitioner="vae-aware", ranks="2GB,1.005GB"),
    ],
    "sd3": [
        dict(**INSIDE, text_encoder_tp_size=4, vae_patch_parallel_size=3),
        dict(**REPLICAS, text_encoder_tp_size={"text_encoder_3": 2}),
    ],
}
KINDS = {"text_encoder": "encoders", "text_encoder_2": "encoders", "text_encoder_3": "encoders", "vae": "vae"}


def held(jobs: list[tuple[Path, dict[str, Any]]]) -> list[dict[str, int]]:
    """Bytes of weights of encoders and VAE on this rank, of a pipeline spread in each of these ways."""
    found = []
    for folder, config in jobs:
        pipeline = load_pipeline(folder, ParallelConfig(**config))
        bytes_of = dict.fromkeys(KINDS.values(), 0)
        for name, kind in KINDS.items():
            if isinstance(part := getattr(pipeline, name, None), nn.Module):
                bytes_of[kind] += sum(own.nbytes for own in set(part.parameters()) if own.device.type != "meta")
        found.append(bytes_of)
    return found


def test_every_rank_holds_what_is_shown(ranks: RankPool, tmp_path: Path) -> None:
    folders = {"wan": TINY_WAN, "sd3": checkpoints.sd3(tmp_path / "sd3")}
    jobs = [(folders[name], config) for name, configs in CONFIGS.items() for config in configs]
    every = ranks.run(4, held, jobs)
    capture = once_each()
    for job, (folder, fields) in enumerate(jobs):
        config = ParallelConfig(**fields)
        shown = study(Question(model=str(folder), config=config, size=SMALL, dtype="float32"), capture)
        inside = shown.degrees.inside
        for place, memory in enumerate(shown.memory):
            of_place = [own[job] for own in every[place * inside : (place + 1) * inside]]
            vae, encoders = (max(own[kind] for own in of_place) for kind in ("vae", "encoders"))
            assert memory.vae == vae, (fields, place)
            if shown.places.texts:  # of so small an encoder most stays whole in every part
                assert (memory.encoders > 0) == (encoders > 0), (fields, place)
            else:
                assert memory.encoders == encoders, (fields, place)
