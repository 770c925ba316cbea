"""Transformers from GGUF files, mapped into memory: a rank reads what its stage holds, when it moves it to its device."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import GGUFQuantizationConfig
from torch import nn

from dit_pipelining.errors import CheckpointError, ConfigError, ModelNotFoundError
from dit_pipelining.weights.pipelines import DtypeChoice, dtype_of, read_index, transformer_classes
from dit_pipelining.weights.quantised import chosen_for
from partitioners.errors import counted

ENDING = ".gguf"


def with_files_opened(folder: Path, components: Mapping[str, Any], dtype: DtypeChoice) -> dict[str, Any]:
    """The arguments of a pipeline, those that name files of its transformers exchanged for what is in these.

    Args:
        folder: of the pipeline, which has the transformer's configuration.
        components: by name; `transformer="flux1-dev-Q8_0.gguf"`, for example.
        dtype: of what is not quantised, as `from_pretrained` takes it.

    Raises:
        ConfigError: a component that is no transformer is a path, or a transformer's file is no GGUF file or to be quantised.
        ModelNotFoundError, CheckpointError: there is no such file, or it cannot be read, or is another model's.
    """
    index = read_index(folder)
    opened = dict(components)
    for name, value in components.items():
        if not isinstance(value, str | Path) or not isinstance(index.get(name), list):
            continue
        cls: Any = transformer_classes(index).get(name)
        path = Path(value)
        if cls is None or path.suffix != ENDING:
            raise ConfigError(
                f"{name}={str(value)!r}: only transformers can be given as files, and only as GGUF files ({ENDING}). Load the "
                "component, for example with from_single_file, and pass it."
            )
        if not path.is_file():
            raise ModelNotFoundError(
                f"{name}={str(value)!r}: there is no such file. Check the path, or download it first."
            )
        torch_dtype = dtype_of(name, dtype)
        chosen = chosen_for(name, components.get("quantization_config"))
        if chosen is not None and not isinstance(chosen, GGUFQuantizationConfig):
            raise ConfigError(
                f"{name}={str(value)!r} is quantised already, but quantization_config asks for {type(chosen).__name__} there. "
                f"Leave {name!r} out of it."
            )
        quantisation = chosen or GGUFQuantizationConfig(compute_dtype=torch_dtype or torch.float32)
        opened[name] = _from_gguf(cls, path, folder / name, torch_dtype, quantisation)
    return opened


def _from_gguf(
    cls: Any, path: Path, folder: Path, dtype: torch.dtype | None, quantisation: GGUFQuantizationConfig
) -> nn.Module:
    """The model with the weights of a GGUF file.

    Args:
        cls: of the model.
        path: of the file.
        folder: of the model's configuration.
        dtype: of what is not quantised.
        quantisation: as diffusers takes it.

    Raises:
        CheckpointError: the file cannot be read, or is another model's.
    """
    tensors = mapped_gguf(path)
    held = f"{counted(len(tensors), 'tensor')}{f', such as {next(iter(tensors))!r}' if tensors else ''}"
    try:
        model: nn.Module = cls.from_single_file(
            tensors, config=str(folder), torch_dtype=dtype, quantization_config=quantisation
        )
    except ImportError:
        raise
    except Exception as error:  # whatever it is that another model's names or shapes lead to
        raise CheckpointError(
            f"{path} does not hold the weights of the {cls.__name__} that {folder / 'config.json'} describes, but {held} "
            f"({type(error).__name__}: {' '.join(str(error).split())}). Give the GGUF file of this model, or load the pipeline "
            "that the file belongs to."
        ) from None
    return model


def mapped_gguf(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a GGUF file, as diffusers reads them, but quantised ones stay in the file until they are looked at.

    Raises:
        CheckpointError: the file cannot be read, or has a kind of quantisation that diffusers does not know.
    """
    import gguf
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFParameter

    try:
        reader = gguf.GGUFReader(path)
    except (
        OSError,
        ValueError,
        LookupError,
        ArithmeticError,
        TypeError,
        MemoryError,
    ) as error:  # of any part of a header
        raise CheckpointError(f"cannot read {path}: {error}. Download or copy the file again.") from None
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            tensors[tensor.name] = torch.from_numpy(tensor.data.copy())
        elif kind in SUPPORTED_GGUF_QUANT_TYPES:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing writes to weights
                tensors[tensor.name] = GGUFParameter(torch.from_numpy(tensor.data), quant_type=kind)
        else:
            raise CheckpointError(f"{path}: {tensor.name} is quantised as {kind.name}, which diffusers cannot read.")
    return tensors
