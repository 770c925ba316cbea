"""What one rank of a pipeline holds on the GPU while it runs, against what `dit-pipelining show` says and against 1 / S.

    python recipes/benchmarks/stage_memory.py [--models flux.1-dev ...] [--json FILE]

On one card, stage after stage: a stage's weights are filled at random, of both transformers where a pipeline has two, the
stage runs one call on what the stage before it sent, and its weights go again. `peak` is the largest allocation meanwhile.

What should happen: a stage holds its blocks and the glue that it computes, so weights are 1 / S of the model and a little
more. On top come the activations of its largest block and what the transformers receive; the buffers between ranks and
what requests in flight hold, which `show` counts too, are not here. Text encoders and the VAE are not part of it: a pipeline
holds them on one rank, not on all.
"""

import argparse
import gc
from typing import Any

import torch
from random_models import random_inputs
from reporting import show, write

from dit_pipelining import split_model
from dit_pipelining.capture.signature import bind
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.planning.memory import rank_memory
from dit_pipelining.planning.presets import Preset, preset
from dit_pipelining.planning.timeline import Workload
from dit_pipelining.planning.weightless import build_weightless, transformer_class
from dit_pipelining.weights.load import release_weights
from dit_pipelining.weights.random import fill_randomly

MODELS = ("flux.1-dev", "wan2.1-t2v-14b", "wan2.2-t2v-a14b")


def stage_rows(facts: Preset, stages: int, device: torch.device) -> list[dict[str, Any]]:
    """Measured and predicted bytes of each stage."""
    inputs = random_inputs(dict(facts.inputs), device)
    splits = [weightless_split(facts, stages, inputs) for _ in facts.components]
    whole = sum(weight_bytes(split.model) for split in splits)
    one_call = Workload(stage_seconds=(1.0,) * stages, transfer_seconds=(0.0,) * (stages - 1))
    predicted = rank_memory([(splits[0], len(splits))], one_call)
    sent: list[tuple[torch.Tensor, ...]] = [() for _ in splits]
    rows = []
    for stage in range(stages):
        for split in splits:
            fill_randomly(split.model, split.stages[stage].held_weights, device)
        held = sum(weight_bytes(split.stages[stage]) for split in splits)
        torch.cuda.reset_peak_memory_stats(device)
        for number, split in enumerate(splits):
            graph, call = split.resolve(bind(split.model.forward, (), inputs))
            sent[number] = split.stages[stage].run(graph, sent[number], call.leaves)
        torch.cuda.synchronize(device)
        others = inputs_bytes(inputs)
        boundary = max(sum(value.bytes for value in values) for values in splits[0].boundaries)
        # What a transformer receives, and what the others have sent or are to receive, lies there meanwhile.
        own = predicted[stage]
        expected = own.total - own.buffers - own.requests + boundary * (len(splits) - (stage == 0))
        peak = torch.cuda.max_memory_allocated(device) - others
        rows.append(
            dict(
                model=facts.name,
                stage=f"{stage} of {stages}",
                whole_weights=whole,
                weights=held,
                weights_share=held / whole * stages,
                peak=peak,
                predicted=expected,
                error=expected / peak - 1,
            )
        )
        print(rows[-1], flush=True)
        for split in splits:
            release_weights(split.model, ())
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def weightless_split(facts: Preset, stages: int, inputs: dict[str, Any]) -> SplitModel:
    return split_model(build_weightless(transformer_class(facts.model_class), dict(facts.config)), stages, inputs)


def weight_bytes(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def inputs_bytes(inputs: dict[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in inputs.values() if torch.is_tensor(leaf))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="presets")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in args.models:
            rows += stage_rows(preset(name), args.stages, device)
            write(args.json, {"card": torch.cuda.get_device_name(0), "rows": rows})
    show(
        f"GB of a rank on {torch.cuda.get_device_name(0)}",
        [
            {
                "model": row["model"],
                "stage": row["stage"],
                "weights": f"{row['weights'] / 1e9:.2f}",
                "of 1 / S": f"{row['weights_share']:.3f}",
                "peak": f"{row['peak'] / 1e9:.2f}",
                "predicted": f"{row['predicted'] / 1e9:.2f}",
                "error": f"{row['error']:+.1%}",
            }
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
