"""Transformers with quantised weights, by diffusers' own quantizers: a stage reads and quantises only its own tensors.

[Note: as diffusers loads the whole]
A quantizer exchanges layers of the model before its weights are there, and makes each quantised tensor of what the checkpoint
has for it: of a plain tensor, or of the parts of one that is stored quantised. diffusers does that file by file, with all that
a file holds; here it is done module by module, with what a stage holds, by the same functions, on the device that diffusers
does it on (torchao: the CPU; bitsandbytes: the GPU). So a tensor has the bits that it has in one process.
"""

from collections.abc import Collection, Container, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import PipelineQuantizationConfig
from diffusers.models.model_loading_utils import load_model_dict_into_meta
from diffusers.quantizers import DiffusersAutoQuantizer
from torch import nn

from dit_pipelining.capture.quantised import is_quantised_linear
from dit_pipelining.errors import CheckpointError, ConfigError
from dit_pipelining.weights.checkpoint import Checkpoint
from dit_pipelining.weights.empty import empty_model, loaded_dtype
from dit_pipelining.weights.load import (
    MOST_NAMED,
    AbsentState,
    move_to,
    name_without_adapter,
    tensor_names,
)
from partitioners.errors import counted

METHODS = ("torchao", "bitsandbytes")
"""Those whose tensors are known to be the same whether they are made one by one or all together."""

BESIDE_A_WEIGHT = ("SCB", "weight_format")
"""What bitsandbytes stores of a layer beside its weight, under names of its own."""


@dataclass(eq=False)
class QuantisedTransformer:
    """How the tensors of one transformer get into it.

    Attributes:
        quantizer: diffusers' own.
        torch_dtype: of what is not quantised.
        kept_in_fp32: parts of names of what stays in float32.
    """

    quantizer: Any
    torch_dtype: torch.dtype
    kept_in_fp32: tuple[str, ...]
    _stored: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return str(self.quantizer.quantization_config.quant_method.value)

    def read(self, model: nn.Module, weights: Iterable[str], checkpoint: Checkpoint) -> None:
        """Map the tensors of some modules and parameters: on the CPU they take no memory until something looks at them."""
        tensors = model.state_dict(keep_vars=True)
        wanted = {name_without_adapter(name) for name in weights}
        wanted |= {name.rpartition(".")[0] for name in wanted if name in tensors}
        owned = {
            stored: name for name, stored in checkpoint.names_for(model).items() if not wanted.isdisjoint(_owners(name))
        }
        stored = {owned[name]: tensor for name, tensor in checkpoint.read(owned, torch.device("cpu"))}
        self._stored = self.quantizer.maybe_update_state_dict(stored)

    def load(self, model: nn.Module, weights: Iterable[str], device: torch.device, given: Container[str] = ()) -> None:
        """Give some modules and parameters their tensors, out of what was read.

        Args:
            model: built by `empty_quantised`.
            weights: names of modules (all their tensors), parameters and buffers.
            device: where they go.
            given: names of tensors that have data already and are only moved.
        """
        weights = list(weights)
        names = {name_without_adapter(name): name for name in tensor_names(model, weights) if name not in given}
        parts: dict[str, torch.Tensor] = {}
        for stored, tensor in self._stored.items():
            layer, _, last = stored.rpartition(".")
            own = next((own for own in _owners(stored) if own in names), None)
            if own is not None:
                parts[names[own] + stored[len(own) :]] = tensor
            elif last in BESIDE_A_WEIGHT and f"{layer}.weight" in names:
                parts[f"{names[f'{layer}.weight'].rpartition('.')[0]}.{last}"] = tensor
        load_model_dict_into_meta(
            model,
            parts,
            dtype=self.torch_dtype,
            hf_quantizer=self.quantizer,
            keep_in_fp32_modules=list(self.kept_in_fp32),
            device_map=self.quantizer.update_device_map(None),
        )
        for name in weights:
            move_to(model, name, device)

    def finish(self, model: nn.Module) -> None:
        """What diffusers does when a model has all its weights."""
        self._stored = {}
        self.quantizer.postprocess_model(model)

    def check_tensors(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        """Compare names of the checkpoint's tensors with the model's; only headers are read.

        Raises:
            CheckpointError: lists what is missing and what is unexpected.
        """
        expected = set(model.state_dict())
        files = [str(path) for path in dict.fromkeys(checkpoint.files.values())]
        loaded = set(self.quantizer.maybe_update_loaded_keys(list(checkpoint.names_for(model)), files))
        lacking = sorted(self.quantizer.update_missing_keys(model, sorted(expected - loaded), prefix=""))
        beside = {
            name
            for name in loaded - expected
            if not expected.isdisjoint(_owners(name)) or name.rpartition(".")[2] in BESIDE_A_WEIGHT
        }
        for kind, names in (("lacks", lacking), ("has unexpected", sorted(loaded - expected - beside))):
            if names:
                shown = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
                raise CheckpointError(
                    f"the checkpoint in {checkpoint.folder} does not fit {type(model).__name__}, quantised by "
                    f"{self.method}: it {kind} {counted(len(names), 'tensor')}: {shown}. Check that config.json and "
                    "the weights belong together."
                )


def check_chosen(chosen: Any, index: Mapping[str, Any]) -> None:
    """Check the caller's configuration of a pipeline's quantisation.

    Args:
        chosen: None, or a PipelineQuantizationConfig.
        index: content of the pipeline's model_index.json.

    Raises:
        ConfigError: it is no such configuration, or names components that the pipeline does not have.
    """
    if chosen is None:
        return
    if not isinstance(chosen, PipelineQuantizationConfig):
        raise ConfigError(
            f"quantization_config is a {type(chosen).__name__}; for a pipeline it has to be diffusers' "
            'PipelineQuantizationConfig, for example PipelineQuantizationConfig(quant_mapping={"transformer": ...}).'
        )
    components = [name for name, entry in index.items() if isinstance(entry, list)]
    unknown = sorted(set(chosen.quant_mapping or chosen.components_to_quantize or ()) - set(components))
    if unknown:
        raise ConfigError(
            f"quantization_config names {', '.join(unknown)}, but the pipeline's components are {', '.join(components)}."
        )


def chosen_for(name: str, chosen: PipelineQuantizationConfig | None) -> Any:
    """What the caller's configuration says for one transformer, or None."""
    if chosen is None:
        return None
    return deepcopy(chosen._resolve_quant_config(is_diffusers=True, module_name=name))  # quantizers change theirs


def chosen_among(
    names: Collection[str], chosen: PipelineQuantizationConfig | None
) -> PipelineQuantizationConfig | None:
    """The part of the caller's configuration that is about these components: diffusers warns of all others."""
    if chosen is None:
        return None
    if chosen.quant_mapping is not None:
        mapping = {name: own for name, own in chosen.quant_mapping.items() if name in names}
        return PipelineQuantizationConfig(quant_mapping=mapping) if mapping else None
    named = [name for name in chosen.components_to_quantize or names if name in names]
    if not named:
        return None
    return PipelineQuantizationConfig(chosen.quant_backend, chosen.quant_kwargs, components_to_quantize=named)


def empty_quantised(
    cls: Any, folder: Path, config: Mapping[str, Any], chosen: Any, torch_dtype: torch.dtype | None
) -> tuple[nn.Module, QuantisedTransformer]:
    """A diffusers model as `from_pretrained` would load it with its quantisation, but without its weights.

    Args:
        cls: the model's class.
        folder: of the model.
        config: content of its config.json; what it says of how its weights are stored goes before `chosen`.
        chosen: quantisation that the caller asks for.
        torch_dtype: of what is not quantised, as asked for.

    Raises:
        ConfigError: the method is not supported, or its library or device is missing.
    """
    stored = config.get("quantization_config")
    try:
        if stored is not None:
            stored = DiffusersAutoQuantizer.merge_quantization_configs(deepcopy(stored), chosen)
        quantizer = DiffusersAutoQuantizer.from_config(stored or chosen, pre_quantized=stored is not None)
        method = str(quantizer.quantization_config.quant_method.value)
        if method not in METHODS:
            raise ConfigError(
                f"{folder.name} is quantised by {method}, whose tensors a stage cannot make by itself; {', '.join(METHODS)} "
                "can. Load the transformer with from_pretrained, and pass it as an argument."
            )
        quantizer.validate_environment(torch_dtype=torch_dtype, device_map=None)
        dtype = quantizer.update_torch_dtype(torch_dtype)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder.name} cannot be quantised: {error}") from None
    kept = tuple(getattr(cls, "_keep_in_fp32_modules", None) or ())
    quantised = QuantisedTransformer(quantizer, dtype, kept)
    model = empty_model(cls, {**config, "quantization_config": quantizer.quantization_config}, dtype)
    quantizer.preprocess_model(model=model, device_map=None, keep_in_fp32_modules=list(kept))
    for name, parameter in model.named_parameters():  # those of layers that have been exchanged
        parameter.data = parameter.data.to(loaded_dtype(model, name, parameter.dtype, dtype))
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if hasattr(getattr(layer, "weight", None), "quant_state"):
            layer.weight.quant_state = AbsentState(torch.Size((layer.out_features, layer.in_features)))
    model.hf_quantizer = quantizer
    model.register_to_config(_pre_quantization_dtype=dtype)  # type: ignore[operator]
    return model.eval(), quantised


def is_quantised(model: nn.Module) -> bool:
    """Whether a model has quantised weights, on this rank or on another one that has layers of it."""
    return getattr(model, "hf_quantizer", None) is not None or any(map(is_quantised_linear, model.modules()))


def layers_without_weights_differ(model: nn.Module) -> bool:
    """Whether peft takes the model's quantised layers for plain ones as long as their weights are not read."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is not None and quantizer.quantization_config.quant_method.value == "bitsandbytes"


def refuse_cutting_quantised(models: Mapping[str, nn.Module], asked: Iterable[str]) -> None:
    """Refuse what quantised weights cannot take part in.

    Args:
        models: transformers, by name.
        asked: what cuts or moves weights, by its name in the configuration.

    Raises:
        ConfigError: names the transformer and what was asked.
    """
    for option in asked:
        for name, model in models.items():
            if is_quantised(model):
                raise ConfigError(
                    f"{option}: the weights of {name!r} ({type(model).__name__}) are quantised; these tensors can be neither "
                    f"cut nor sent to other ranks. Leave {option} out, or load {name!r} unquantised."
                )


def _owners(name: str) -> list[str]:
    """A tensor's name and everything it may lie in: modules, and the weight of which it is a part.

    bitsandbytes stores `to_q.weight.absmax` beside `to_q.weight`, torchao `to_q._weight_scale`.
    """
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
