"""Transformers from GGUF files, mapped into memory: a rank reads what its stage holds, when it moves it to its device."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import GGUFQuantizationConfig

from dit_pipelining.errors import CheckpointError, ConfigError, ModelNotFoundError
from dit_pipelining.weights.pipelines import DtypeChoice, dtype_of, read_index, transformer_classes
from dit_pipelining.weights.quantised import chosen_for

ENDING = ".gguf"


def with_files_opened(folder: Path, components: Mapping[str, Any], dtype: DtypeChoice) -> dict[str, Any]:
    """The arguments of a pipeline, those that name files of its transformers exchanged for what is in these.

    Args:
        folder: of the pipeline, which has the transformer's configuration.
        components: by name; `transformer="flux1-dev-Q8_0.gguf"`, for example.
        dtype: of what is not quantised, as `from_pretrained` takes it.

    Raises:
        ConfigError: a component that is no transformer is a path, or a transformer's file is no GGUF file.
        ModelNotFoundError, CheckpointError: there is no such file, or it cannot be read.
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
        opened[name] = cls.from_single_file(
            mapped_gguf(path),
            config=str(folder / name),
            torch_dtype=torch_dtype,
            quantization_config=chosen or GGUFQuantizationConfig(compute_dtype=torch_dtype or torch.float32),
        )
    return opened


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
        raise CheckpointError(f"cannot read {path}: {error}. Download or copy the file again.") from error
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
