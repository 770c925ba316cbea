"""From a model's name to its measured profile."""

import platform
from importlib.metadata import version
from pathlib import Path

import torch

from dit_pipelining.costs.measured import MeasuredProfile
from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.inputs import build_inputs, read_inputs, with_dtype
from dit_pipelining.planning.models import ModelSpec, SizeRequest, TransformerSpec, model_inputs
from dit_pipelining.planning.profiling import measure_parts, random_inputs
from dit_pipelining.planning.recipes import Size
from dit_pipelining.planning.vae_profile import build_vae, measure_vae
from dit_pipelining.planning.weightless import build_weightless, transformer_class


def measure_model(
    model: ModelSpec,
    device: torch.device,
    asked: SizeRequest,
    inputs: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    with_vae: bool = True,
) -> tuple[MeasuredProfile, list[str]]:
    """Measure a model's parts.

    Args:
        model: from `find_model`.
        device: that is measured.
        asked: size of what is generated.
        inputs: file that describes the inputs of one call instead.
        dtype: of the weights.
        with_vae: measure the VAE too, where it is known.

    Returns:
        the profile, and what could not be measured, in sentences.

    Raises:
        SplitError: there is no such model, or it cannot do this size.
    """
    if inputs is not None and not asked.is_empty:
        raise ConfigError("--inputs describes the inputs, and so their size; leave out either it or the sizes.")
    spec = model.transformers[0]
    written = str(dtype).removeprefix("torch.")
    size: Size | None = None
    if inputs is not None:
        described = read_inputs(inputs)
    else:
        described, size = model_inputs(model, spec, asked)
    transformer = build_weightless(transformer_class(spec.model_class), spec.config, dtype)
    parts = measure_parts(transformer, random_inputs(build_inputs(with_dtype(described, written)), device), device)
    encoding, decoding, problems = _measure_vae(model, size, dtype, device) if with_vae else (None, None, [])
    return (
        MeasuredProfile(
            model=model.name,
            model_class=spec.model_class,
            device=device_name(device),
            dtype=written,
            blocks=parts.blocks,
            prologue=parts.prologue,
            epilogue=parts.epilogue,
            size=vars(size) if size is not None else {},
            vae_encode_seconds=encoding,
            vae_decode_seconds=decoding,
            versions=_versions(),
        ),
        [*_others(model, spec), *problems],
    )


def device_name(device: torch.device) -> str:
    """As torch names a GPU; `cpu` for the host's processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _measure_vae(
    model: ModelSpec, size: Size | None, dtype: torch.dtype, device: torch.device
) -> tuple[float | None, float | None, list[str]]:
    vae = build_vae(model, dtype) if size is not None else None
    if vae is None or size is None:
        return None, None, ["the VAE was not measured, since it is not known."]
    try:
        return *measure_vae(vae, size, dtype, device), []
    except (NotImplementedError, torch.OutOfMemoryError) as error:
        # The transformer's times are worth keeping all the same.
        return None, None, [f"the VAE was not measured: {str(error).splitlines()[0]}"]


def _others(model: ModelSpec, spec: TransformerSpec) -> list[str]:
    others = [other for other in model.transformers if other is not spec]
    return [f"{' and '.join(other.names)} differ from {spec.names[0]} and were not measured." for other in others]


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "diffusers")} | {"python": platform.python_version()}
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
