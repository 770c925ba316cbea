"""`dit-pipelining show --search`: from what was asked to the best degrees."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dit_pipelining.capture.graph import CaptureCache
from dit_pipelining.capture.signature import bind
from dit_pipelining.cli.capturing import capturing
from dit_pipelining.costs.devices import DeviceProfile, find_device
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.components import Components, components_of
from dit_pipelining.planning.guidance import step_calls
from dit_pipelining.planning.inputs import build_inputs, with_dtype
from dit_pipelining.planning.models import SizeRequest, find_model, model_inputs
from dit_pipelining.planning.search import ModelWork, Search, model_work, search
from dit_pipelining.planning.weightless import build_weightless, transformer_class

DEFAULT_DEVICE = "h200"
DEFAULT_STEPS = 50
HEADS = ("num_attention_heads", "num_heads", "n_heads")
"""Names of the number of attention heads in configurations of diffusers' transformers."""


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
    return search(_work(name, found, size or SizeRequest(), dtype, steps, guidance), gpus, found, topology, goal)


def _work(
    name: str, device: DeviceProfile, size: SizeRequest, dtype: str, steps: int | None, guidance: str | None
) -> ModelWork:
    model = find_model(name)
    if len(model.transformers) > 1:
        kinds = ", ".join("+".join(spec.names) for spec in model.transformers)
        raise ConfigError(f"{name} has transformers of several kinds ({kinds}); a search plans those that are alike.")
    spec = model.transformers[0]
    calls = step_calls(guidance, spec.known, size.batch, replicas=1)
    described, made = model_inputs(model, spec, replace(size, batch=calls.batch))
    beside = Components()
    if model.source == "preset" and spec.known is not None and made is not None:
        beside = components_of(spec.known, made, getattr(torch, dtype).itemsize, device, None)
    with capturing(spec):
        transformer = build_weightless(transformer_class(spec.model_class), spec.config, getattr(torch, dtype))
        captures = CaptureCache(transformer, None, transformer.forward, count_work=True)
        graph = captures.get(bind(transformer.forward, (), build_inputs(with_dtype(described, dtype))))
        return model_work(
            graph,
            transformer,
            device,
            heads=_heads(spec.full_config),
            copies=len(spec.names),
            calls=calls.calls,
            batch=calls.batch,
            steps=steps or (spec.known.defaults["steps"] if spec.known else DEFAULT_STEPS),
            beside=beside,
        )


def _heads(config: Mapping[str, Any]) -> int | None:
    found = [config[name] for name in HEADS if isinstance(config.get(name), int)]
    return found[0] if found else None
