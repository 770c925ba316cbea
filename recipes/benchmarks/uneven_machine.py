"""Cut models for two cards of which the first is twice as fast and has more memory, by `uniform`, `balanced` and `vae-aware`.

Nothing is run: seconds are predicted from the data sheet of the slower card (that of a GeForce RTX 4090), memory is that of
weights and of the activations that tensors without data would take. `vae-aware` also chooses the card of the text encoder;
the others expect it on the first.

    python recipes/benchmarks/uneven_machine.py
"""

import argparse
from dataclasses import dataclass

import torch
from reporting import show, write

from dit_pipelining.api import split_model
from dit_pipelining.planning.inputs import build_inputs
from dit_pipelining.planning.models import SizeRequest, find_model, model_inputs
from dit_pipelining.planning.presets import preset
from dit_pipelining.planning.weightless import build_weightless, transformer_class
from partitioners import Component, DoesNotFitError

BFLOAT16_BYTES = 2
DEVICE = "rtx4090"


@dataclass(frozen=True)
class Case:
    """A model on a machine.

    Attributes:
        model: a preset.
        size: of what it makes.
        ranks: as `split_model` takes them.
        with_components: whether text encoders and VAE share the cards; else prompts are encoded ahead.
    """

    model: str
    size: SizeRequest
    ranks: str
    with_components: bool


CASES = (
    Case("flux.1-dev", SizeRequest(), "24GB*2,16GB", False),
    Case("wan2.1-t2v-14b", SizeRequest(height=480, width=832), "24GB*2,16GB", False),
    Case("wan2.2-ti2v-5b", SizeRequest(), "16GB*2,16GB", True),
)


def components(name: str) -> list[Component]:
    """Text encoders and VAE of a preset, in bfloat16. Their seconds, spread over all steps, are left out."""
    known = preset(name)
    encoders = sum(encoder["parameters"] for encoder in known.text_encoders)
    return [
        Component("text encoder", bytes=encoders * BFLOAT16_BYTES),
        Component("vae", bytes=known.vae["parameters"] * BFLOAT16_BYTES, preferred_rank=-1),
    ]


def rows(case: Case) -> list[dict[str, str]]:
    """One row for each partitioner."""
    model = find_model(case.model)
    spec = model.transformers[0]
    described, size = model_inputs(model, spec, case.size)
    with torch.no_grad():
        transformer = build_weightless(transformer_class(spec.model_class), spec.config)
    found = []
    for partitioner in ("uniform", "balanced", "vae-aware"):
        row = {"model": f"{case.model}, {size}", "cards": case.ranks, "partitioner": partitioner}
        try:
            with torch.no_grad():
                cut = split_model(
                    transformer,
                    2,
                    build_inputs(described),
                    partitioner=partitioner,
                    ranks=case.ranks,
                    profile=DEVICE,
                    components=components(case.model) if case.with_components else (),
                ).cut
        except DoesNotFitError as error:
            lacking = max(error.shortfalls) / 2**30
            found.append(
                {**row, "blocks": "-", "seconds a call": "-", "memory": "-", "fits": f"lacks {lacking:.1f} GiB"}
            )
            continue
        assert cut is not None
        partition, seconds = cut.partition, cut.partition.stage_seconds(cut.costs, cut.ranks)
        lacking = max(partition.shortfalls(cut.costs, cut.ranks)) / 2**30
        owner = f", text encoder on card {cut.owners['text encoder']}" if cut.owners else ""
        row |= {
            "blocks": f"{partition}{owner}",
            "seconds a call": ", ".join(f"{own:.2f}" for own in seconds),
            "memory": ", ".join(f"{own / 2**30:.1f}" for own in partition.stage_bytes(cut.costs, cut.ranks)) + " GiB",
            "fits": f"lacks {lacking:.1f} GiB" if lacking else "yes",
        }
        found.append(row)
    return found


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--json", metavar="FILE", help="also write the figures here")
    args = flags.parse_args()
    table = [row for case in CASES for row in rows(case)]
    show("Two uneven cards", table)
    write(args.json, {"cases": table})


if __name__ == "__main__":
    main()
