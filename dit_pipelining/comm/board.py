"""What ranks tell each other beside the data, in the store of the launch: signs of life, and the first error."""

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from dit_pipelining.torch_internals import own_client

LONGEST_MESSAGE = 4000
LONGEST_TRACEBACK = 12000
"""In characters; the end is kept, where the cause is."""


@dataclass(frozen=True)
class Failure:
    """What ended the run.

    Attributes:
        rank: where it happened.
        message: one that names the rank.
        traceback: on that rank, if something was raised there.
    """

    rank: int
    message: str
    traceback: str = ""

    @classmethod
    def raised(cls, rank: int, error: BaseException) -> "Failure":
        """That `error` was raised on `rank`."""
        message = f"rank {rank} failed: {type(error).__name__}: {str(error)[:LONGEST_MESSAGE]}"
        return cls(rank, message, "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:])

    def __str__(self) -> str:
        if not self.traceback:
            return self.message
        return f"{self.message}\n\nOn rank {self.rank}:\n{self.traceback.rstrip()}"


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life, and how far it is.

    Attributes:
        number: another one each time.
        call: how many calls this rank has begun, loading included.
        steps: how often it has communicated in this call.
        ended: how the call ended: the type of what it raised, or `RETURNED`; None while it runs.
        agreed: the last call that raised on all ranks alike.
        released: the rank needs the store no more.
        left: the rank has ended its part in the run.
    """

    number: int = 0
    call: int = 0
    steps: int = 0
    ended: str | None = None
    agreed: int = 0
    released: bool = False
    left: bool = False

    @property
    def progress(self) -> tuple[int, int]:
        return self.call, self.steps


RETURNED = "returned"


class Board:
    """The ranks' notes in the store; every method is one or two requests to it, from whichever thread.

    Arriving and guarding go through a client of their own: a thread that waits for a key holds its client.

    Args:
        store: of the launch.
        rank: of this process.
        world_size: number of ranks.

    Raises:
        RuntimeError: here and in every method, the store is gone.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._launch_store = store  # the server, on the rank that hosts it, must live until the others have left
        own = own_client(store)
        number = own.add(f"dit_pipelining/launches/{rank}", 1)  # ranks load the same pipelines in the same order
        self._store = dist.PrefixStore(f"dit_pipelining/{number}", own)
        self._store.compare_set("failure", "", "")  # from here on it exists, so that reading never waits
        self._beats = [f"beat/{other}" for other in range(world_size)]

    def say(self, beat: Beat) -> None:
        """Show this rank's beat; the first one is its arrival."""
        self._store.set(self._beats[self.rank], json.dumps(asdict(beat)))

    def missing(self) -> list[int]:
        """The ranks that have not arrived."""
        if self._store.check(self._beats):
            return []
        return [rank for rank, key in enumerate(self._beats) if not self._store.check([key])]

    def publish(self, failure: Failure) -> Failure:
        """Make this the failure of the run, unless there is one; returns the first."""
        return _failure(self._store.compare_set("failure", "", json.dumps(asdict(failure)))) or failure

    def failure(self) -> Failure | None:
        """The first failure, if there is one."""
        return _failure(self._store.get("failure"))

    def read(self) -> tuple[Failure | None, Sequence[Beat]]:
        """The first failure, and all ranks' beats, once all have arrived."""
        failure, *beats = self._store.multi_get(["failure", *self._beats])
        return _failure(failure), [Beat(**_json(beat)) for beat in beats]


def _failure(text: bytes) -> Failure | None:
    return Failure(**_json(text)) if text else None


def _json(text: bytes) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    return values
