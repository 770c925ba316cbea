"""`dit-pipelining show --search`: from what was asked to the best degrees."""

import math
from dataclasses import replace

import torch
from torch import nn

from dit_pipelining.capture.blocks import find_blocks
from dit_pipelining.capture.graph import BlockGraph
from dit_pipelining.cli.arguments import DEFAULT_STEPS
from dit_pipelining.cli.capturing import captured
from dit_pipelining.costs.devices import DEFAULT_DEVICE, DeviceProfile, find_device
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.beside import beside_model
from dit_pipelining.planning.components import Components, components_of, with_tiles
from dit_pipelining.planning.degrees import Divides
from dit_pipelining.planning.guidance import step_calls
from dit_pipelining.planning.models import SizeRequest, find_model, model_inputs
from dit_pipelining.planning.search import Search, search
from dit_pipelining.planning.work import ModelWork, model_work
from dit_pipelining.sharding.sequence import shared_heads
from dit_pipelining.sharding.sequence_plans import sequence_plan
from dit_pipelining.sharding.tensor import check_tensor_parallel


def search_model(
    name: str,
    gpus: int,
    *,
    device: str | None = None,
    topology: str = "auto",
    goal: str = "latency",
    size: SizeRequest | None = None,
    dtype: str = "bfloat16",
    steps: int | None = None,
    guidance: str | None = None,
) -> Search:
    """The best degrees for a model on a number of equal GPUs, without its weights and without a GPU.

    Args:
        name: preset, folder or file.
        gpus: how many.
        device: each of them, such as `"h100"`. Default: `"h200"`.
        topology: of the links between them.
        goal: `"latency"`, `"throughput"` or `"memory"`.
        size: of what is generated. Default: the model's own.
        dtype: of the weights, by its name in torch.
        steps: of a request. Default: the model's own.
        guidance: of `GUIDANCE_MODES`. Default: as the model's pipeline does it.

    Raises:
        ConfigError, InputError: something that was asked cannot be.
    """
    found = find_device(device or DEFAULT_DEVICE)
    work = work_of(name, found, size or SizeRequest(), dtype, steps, guidance)
    return search(work, gpus, found, topology, goal)


def work_of(
    name: str,
    device: DeviceProfile,
    size: SizeRequest,
    dtype: str = "bfloat16",
    steps: int | None = None,
    guidance: str | None = None,
) -> ModelWork:
    """What a search is told of a model; arguments as for `search_model`."""
    model = find_model(name)
    if len(model.transformers) > 1:
        kinds = ", ".join("+".join(spec.names) for spec in model.transformers)
        raise ConfigError(f"{name} has transformers of several kinds ({kinds}); a search plans those that are alike.")
    spec = model.transformers[0]
    calls = step_calls(guidance, spec.known, size.batch, replicas=1)
    described, made = model_inputs(model, spec, replace(size, batch=calls.batch))
    beside, known = Components(), beside_model(model)
    if known is not None:
        kind = getattr(torch, dtype)
        beside = with_tiles(components_of(known, made, kind.itemsize, device), known, model, made, kind)
    own = captured(spec, described, dtype)
    return replace(
        model_work(own.graph, own.model, device, divides_of(own.model, own.graph)),
        copies=len(spec.names),
        calls=calls.calls,
        batch=calls.batch,
        steps=steps or (spec.known.defaults["steps"] if spec.known else DEFAULT_STEPS),
        beside=beside,
    )


def divides_of(model: nn.Module, graph: BlockGraph) -> Divides:
    """By what a model can be divided, asked of the code that divides it."""
    refusals = {}
    heads: int | None = None
    sizes: tuple[int, ...] = (1,)
    try:
        heads = shared_heads(model)
    except ConfigError as error:
        refusals["sequence"] = str(error)
    try:
        sizes = tuple(check_tensor_parallel(model, 1, find_blocks(model)).sizes())
    except ConfigError as error:
        refusals["tensor"] = str(error)
    tokens = None if "sequence" in refusals else _tokens(graph, splits_text=sequence_plan(model).splits_text)
    return Divides(heads, sizes, tokens, tuple(refusals.items()))


def _tokens(graph: BlockGraph, *, splits_text: bool) -> int | None:
    """A number that divides wherever the numbers of tokens do that are split: those of the first block's inputs."""
    shapes = [shape for node in graph.blocks[0].all_input_nodes if len(shape := node.meta.get("shape", ())) == 3]
    longest = sorted((shape[1] for shape in shapes), reverse=True)
    return math.gcd(*longest[: 2 if splits_text else 1]) if longest else None
