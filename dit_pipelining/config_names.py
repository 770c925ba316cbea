"""What errors call the settings of a ParallelConfig: as whoever gave them wrote them."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dit_pipelining.errors import ConfigError
from partitioners.errors import ARGUMENT, CountsError


@contextmanager
def sources_named(told: Mapping[str, tuple[Any, str]]) -> Iterator[None]:
    """Let errors name settings by the file or variable that they are from.

    Args:
        told: `ParallelConfig.told`.
    """
    try:
        yield
    except ConfigError as error:
        message = str(error)
        for field, (value, name) in told.items():
            setting = re.escape(f"{field}={value!r}")
            message = name.join(re.split(rf"(?<!\w){setting}(?!\w|\.\d)", message))
        error.args = (message,)
        raise
    except CountsError as error:
        if error.source != ARGUMENT or "partition" not in told:
            raise
        raise type(error)(error.counts, told["partition"][1], *error.args[2:]) from None
