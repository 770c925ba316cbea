"""Load the parts of text encoders that are cut over ranks: of a tensor that is cut, each rank reads its part only.

[Note: names in a text encoder's files]
The transformers library renames what it reads, by rules that differ between releases and models. So it is asked: a model is
loaded from tensors with the names and shapes of those in the files, but each of one number in one element of memory, and
what number is in a parameter afterwards says which tensor belongs there. Then the tensors, or the rank's parts of them, are
read, and the library loads them into a model whose layers are cut: dtypes, tied weights and all else are its own doing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from torch import nn

from dit_pipelining.errors import CheckpointError, ConfigError
from dit_pipelining.sharding.teams import Team
from dit_pipelining.sharding.text_encoder import cut_text_encoder
from dit_pipelining.sharding.text_plans import TextPlan
from dit_pipelining.weights.checkpoint import Checkpoint, open_checkpoint, variant_in
from dit_pipelining.weights.components import load_and_describe

WEIGHTS = "model"
"""How the names of the transformers library's files begin."""

GENERATION = "generation_config.json"
"""Its file with the defaults of `generate`."""


def empty_text_encoder(cls: Any, folder: Path, quantisation: object = None) -> Any:
    """A text encoder without weights, from its configuration.

    Args:
        cls: its class in the transformers library.
        folder: of the encoder.
        quantisation: that is asked for.

    Raises:
        ConfigError: its weights are stored quantised, or are to be quantised.
    """
    config = cls.config_class.from_pretrained(folder)
    stored = getattr(config, "quantization_config", None) is not None
    if stored or quantisation is not None:
        raise ConfigError(
            f"the weights in {folder} are {'stored' if stored else 'to be'} quantised, and a rank holds parts of plain tensors "
            f"only. Leave text_encoder_tp_size at 1 for {folder.name!r}."
        )
    with init_empty_weights(include_buffers=False):
        model = cls(config)
    model.tie_weights()
    return model


def load_parts(
    folder: Path,
    encoders: Mapping[str, tuple[Any, TextPlan]],
    teams: Mapping[str, Team],
    groups: Mapping[str, dist.ProcessGroup],
    options: Mapping[str, Any],
    callers: dist.ProcessGroup,
) -> dict[str, nn.Module]:
    """Load this rank's parts of text encoders, and get those of which it has none without weights.

    Args:
        folder: of the pipeline.
        encoders: class and plan of each, by name.
        teams: of ranks that have the parts.
        groups: of these ranks.
        options: `dtype` and `variant`, as `from_pretrained` takes them.
        callers: group of all ranks that make the same calls, over gloo; all of them call this.

    Raises:
        Exception: what loading raised, on every rank.
    """
    dtype, variant, rank = options.get("dtype"), options.get("variant"), dist.get_rank()

    def load() -> dict[str, nn.Module]:
        return {
            name: _load_part(cls, folder / name, plan, groups[name], _dtype_of(name, dtype), variant)
            for name, (cls, plan) in encoders.items()
            if rank in teams[name].compute
        }

    leads = {name: teams[name].lead for name in encoders}
    return load_and_describe(load, leads, {rank for name in encoders for rank in teams[name].compute}, callers)


def cut_in_memory(
    encoders: Mapping[str, nn.Module], plans: Mapping[str, TextPlan], groups: Mapping[str, dist.ProcessGroup]
) -> None:
    """Leave text encoders that are loaded this rank's part; one of which it has none stays as it is."""
    for name, encoder in encoders.items():
        if dist.get_rank() in dist.get_process_group_ranks(groups[name]):
            cut_text_encoder(encoder, plans[name], groups[name])


def _load_part(
    cls: Any, folder: Path, plan: TextPlan, group: dist.ProcessGroup, dtype: Any, variant: str | None
) -> nn.Module:
    """This rank's part of a text encoder, on the CPU, otherwise as `from_pretrained` loads it.

    Args:
        cls: its class in the transformers library.
        folder: of the encoder.
        plan: how it is cut.
        group: the ranks over which it is cut.
        dtype: of the weights, as `from_pretrained` takes it.
        variant: of the files; as in diffusers it holds if there are files of it.

    Raises:
        CheckpointError: the files lack a tensor, or hold it in another form than the model.
    """
    checkpoint = open_checkpoint(folder, variant_in(folder, variant), WEIGHTS)
    shards = cut_text_encoder(empty_text_encoder(cls, folder), plan, group)
    stored = _names_in_files(cls, folder, checkpoint)
    parts = {stored[name]: shard for name, shard in shards.items()}
    tensors = dict(checkpoint.read(sorted(set(stored.values())), torch.device("cpu"), parts))

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        cut_text_encoder(self, plan, group)

    part = type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})
    config = cls.config_class.from_pretrained(folder)
    file = GENERATION if (folder / GENERATION).is_file() else "config.json"
    generation = transformers.GenerationConfig.from_pretrained(folder, config_file_name=file)
    model: Any = part.from_pretrained(  # type: ignore[attr-defined]
        None, config=config, state_dict=tensors, dtype=dtype, generation_config=generation
    )
    model.__class__ = cls
    model.name_or_path = model.config.name_or_path = str(folder)
    return model


def _names_in_files(cls: Any, folder: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """The name of each parameter's tensor in the files. See [Note: names in a text encoder's files]."""
    names = sorted(checkpoint.shapes)
    numbers = {name: torch.full((), float(i)).expand(checkpoint.shapes[name]) for i, name in enumerate(names)}
    with _quiet():
        config = cls.config_class.from_pretrained(folder)
        model = cls.from_pretrained(None, config=config, state_dict=numbers, dtype=torch.float32)
    found, lacking = {}, []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.untyped_storage().nbytes() == parameter.itemsize:
            found[name] = names[int(parameter.detach()[(0,) * parameter.ndim])]
        elif parameter.numel():
            lacking.append(name)
    if lacking:
        raise CheckpointError(
            f"the files in {folder} lack {lacking[0]!r}{f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''}, or hold "
            f"it in another form than {cls.__name__}, of which no part can be read. Check that config.json and the weights "
            "belong together, or leave text_encoder_tp_size at 1 for this component."
        )
    return found


def _dtype_of(name: str, dtype: Any) -> Any:
    """The dtype of one component where diffusers takes one for all, or one by component."""
    return dtype.get(name, dtype.get("default", torch.float32)) if isinstance(dtype, Mapping) else dtype


@contextmanager
def _quiet() -> Iterator[None]:
    """The library says nothing meanwhile, and shows no progress."""
    logging = transformers.utils.logging
    verbosity, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows:
            logging.enable_progress_bar()
