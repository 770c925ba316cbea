"""Start ranks from a plain script or a notebook, without torchrun."""

import multiprocessing
import pickle
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dit_pipelining.config_checks import LAUNCH_RUN, check_positive
from dit_pipelining.errors import ConfigError, RemoteRankError


def launch(function: Callable[..., Any], *args: Any, nproc: int, start_method: str | None = None) -> list[Any]:
    """Call a function in several new processes on this machine, as torchrun would start them.

    Inside, `load_pipeline` and the rest work as in a script under torchrun.

    Args:
        function: what every rank runs.
        args: its arguments.
        nproc: number of ranks.
        start_method: `"spawn"` (default): new interpreters, which import the function, so it must be in a file, and in a
            script the call of `launch` must stand below `if __name__ == "__main__":`, since they import that too. `"fork"`
            (default for functions that are in no file: of a notebook, an interactive session, `python -c` or a script read
            from the standard input): copies of this process, which must not have used CUDA yet.

    Returns:
        what the function returned on each rank.

    Raises:
        ConfigError: `nproc` is no positive integer, this process is a rank already, or the function cannot be started this way.
        RemoteRankError: a rank failed; with its message and traceback.
    """
    check_positive("nproc", nproc)
    if not callable(function):
        raise ConfigError(f"expected a function to launch, got {function!r}.")
    if torch.distributed.is_initialized():
        raise ConfigError(
            "launch was called by a process that is a rank of a launch already; call the function itself."
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "the new processes import the script that calls launch, and came to that call again: put it below "
            '`if __name__ == "__main__":`.'
        )
    file = getattr(sys.modules["__main__"], "__file__", None)  # "<stdin>" for a script that is read from there
    typed = getattr(function, "__module__", None) == "__main__" and (file is None or not Path(file).is_file())
    method = start_method or ("fork" if typed else "spawn")
    if method not in multiprocessing.get_all_start_methods():
        raise ConfigError(
            f"start_method={method!r}: expected one of {', '.join(multiprocessing.get_all_start_methods())}."
        )
    if method == "fork" and torch.cuda.is_initialized():
        raise ConfigError(
            "this process has used CUDA, which does not survive a fork. Restart the notebook and launch before anything "
            "touches the GPU, or put the function into a file and import it."
        )
    if method != "fork":
        _check_that_processes_find(function, args, in_no_file=typed)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"{LAUNCH_RUN}{uuid.uuid4().hex}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method=method,
    )
    try:
        results: dict[int, Any] = elastic_launch(config, function)(*args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RemoteRankError(f"rank {rank} failed: {_told_by(failure)}") from None
    return [results[rank] for rank in range(nproc)]


def _told_by(failure: ProcessFailure) -> str:
    """What a rank raised, with its traceback."""
    raised: Any = failure.message  # as `record` wrote it, or what torchrun says instead
    if isinstance(raised, dict):
        return f"{raised['message']}\n\n{raised['extraInfo']['py_callstack']}"
    ended_early = str(raised).startswith("To enable traceback")  # before it could say anything here
    return "it ended while it started, and printed why above" if ended_early else str(raised)


def _check_that_processes_find(function: Callable[..., Any], args: tuple[Any, ...], *, in_no_file: bool) -> None:
    """Check that a new interpreter can import a function and get its arguments.

    Raises:
        ConfigError: it cannot.
    """
    try:
        pickle.dumps((function, args))
        problem = "it is in no file" if in_no_file else None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise ConfigError(
            f"{function!r} with its arguments cannot be sent to new processes, which import it ({problem}). Give a function "
            'that a file defines at its top, neither a lambda nor one inside another function; or start_method="fork".'
        )
