"""What a user can meet, each error saying what was wrong and what to change."""

from partitioners.errors import PartitionError

__all__ = [
    "USER_ERRORS",
    "BlocksNotFoundError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "InputError",
    "ModelNotFoundError",
    "NotATransformerError",
    "PartitionError",
    "QueueFullError",
    "RemoteRankError",
    "SplitError",
    "StageForwardError",
    "WorldSizeError",
]


class SplitError(ValueError):
    """Base of all errors of dit_pipelining that come from what the caller gave."""


class ConfigError(SplitError):
    """A field of ParallelConfig, a flag or an environment variable has a value that cannot be used."""


class WorldSizeError(ConfigError):
    """The number of launched processes is not the product of the parallel degrees."""


class NotATransformerError(SplitError):
    """The object or class to split is not a module with a forward over transformer blocks."""


class BlocksNotFoundError(SplitError):
    """The model has no list of blocks, or the named blocks do not exist or are never called."""


class InputError(SplitError):
    """The inputs of a call do not fit the model or the captured graph."""


class CaptureError(SplitError):
    """The glue of the model's forward does something that cannot be recorded."""


class ModelNotFoundError(SplitError):
    """A name is neither a folder, nor a config file, nor a preset, nor a hub id that can be reached."""


class CheckpointError(SplitError):
    """A checkpoint folder lacks files or tensors, or holds tensors that the model does not know."""


class StageForwardError(SplitError, TypeError):
    """A hand-written transformer or predict_noise does not take or give intermediate tensors as a stage must."""


class RemoteRankError(RuntimeError):
    """Another rank failed first, died, left or never came; the message names it, the cause and its traceback."""


class QueueFullError(RuntimeError):
    """As many requests wait already as a queue takes."""


USER_ERRORS = (SplitError, PartitionError)
"""All that comes from what the caller gave: a command prints these as one line, without a traceback."""
