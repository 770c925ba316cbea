"""What a split model will do on a machine, before it runs there: seconds of its stages, and a timeline of a whole run."""

import math
from collections.abc import Sequence

from dit_pipelining.capture.nodes import value_bytes
from dit_pipelining.costs.devices import DeviceProfile, Link
from dit_pipelining.lowering.split import SplitModel
from dit_pipelining.planning.components import NOTHING, Placed
from dit_pipelining.planning.degrees import ALONE, Degrees
from dit_pipelining.planning.simulation import simulate
from dit_pipelining.planning.timeline import Load, Timeline, Workload


def forecast(
    split: SplitModel,
    devices: Sequence[DeviceProfile],
    topology: str,
    load: Load,
    beside: Placed = NOTHING,
    degrees: Degrees = ALONE,
) -> Timeline:
    """Predict a run.

    Args:
        split: with the plan of its cut, captured with the inputs of one call (one branch of guidance of one request).
        devices: of the ranks of its stages.
        topology: of the links between them.
        load: what is to be run.
        beside: the components, on the ranks of a line.
        degrees: how ranks share the stages; those that share the tokens of a call pass their parts on.
    """
    cut = split.cut
    assert cut is not None
    links = [device.link(topology) for device in devices]
    results = [value_bytes(node) for node in split.graph.output_nodes]
    return simulate(
        Workload(
            stage_seconds=tuple(cut.partition.compute_seconds(cut.costs, cut.ranks)),
            transfer_seconds=tuple(
                transfer_seconds(link, [value.bytes / degrees.sequence for value in crossing])
                for link, crossing in zip(links, split.boundaries, strict=False)
            ),
            boundary_tensors=tuple(len(crossing) for crossing in split.boundaries),
            result_seconds=result_seconds(links[-1], results, split.num_stages * load.replicas),
            encodes=beside.encodes,
            decodes=beside.decodes,
            **vars(load),
        )
    )


def transfer_seconds(link: Link, sizes: Sequence[float]) -> float:
    """Seconds for some tensors, one after the other."""
    return link.latency_seconds * len(sizes) + sum(sizes) / link.usable_bytes_per_second


def result_seconds(link: Link, sizes: Sequence[float], ranks: int) -> float:
    """Seconds until all ranks of a line have a result of such tensors: a broadcast goes along a tree."""
    hops = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    return hops * transfer_seconds(link, sizes)
