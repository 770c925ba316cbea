"""Components that live on one rank: text and image encoders, VAEs. Their calls run there and return everywhere.

[Note: owned components]
Every rank has a module of the component's class, with its configuration and attributes; only the owner's has weights. A
call (the forward, `encode`, `decode`, `generate`, ...) is made on every rank with the same arguments. The owner runs it
there and then, in the thread and the random state of the request, which is what one process does; then every rank gives
its turn to the other requests, and takes the result when it is its turn again. So while the owner decodes one request,
others' calls that are in flight go on, and no rank but the owner waits for the decoding.

What else a call changes travels with the result: torch's random state, and that of generators among the arguments. An
exception travels too, and is raised on every rank. A distribution (`latent_dist`) travels as its tensors, so each rank
samples it with its own generator. A submodule that is called from outside (CLIP's final norm by Kandinsky) is a component
in its own right as soon as it is reached.

Ranks that help with the tiles of a VAE, or that have a part of a text encoder, do so within the call too, before they give
their turn away: see [Note: teams].
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dit_pipelining.comm.links import Work
from dit_pipelining.comm.packing import Packed, pack, tensor_in, unpack
from dit_pipelining.comm.portable_errors import portable
from dit_pipelining.comm.sender_links import SenderLinks
from dit_pipelining.errors import ConfigError
from dit_pipelining.random_state import differ, random_state, set_random_state
from dit_pipelining.runtime.pending import resolved
from dit_pipelining.runtime.rolling import Rolling
from dit_pipelining.runtime.turns import OtherRequestFailedError, RequestCancelledError
from dit_pipelining.runtime.withheld import refuse_withheld, withheld
from dit_pipelining.sharding.teams import TeamWork
from dit_pipelining.torch_internals import tree_flatten

DECODES = re.compile(r"(^|_)(forward|decode|denoise)(_|$)")
"""Names of a decoder's methods whose results only ranks that return results need."""

RECEIVES, SENDS = 0, 1
"""Order in which transfers that nobody waits for any more are finished; the other way round, two owners would hang."""

Call = Callable[..., Any]


class OwnedComponent:
    """Runs the calls of one component on its owner.

    Args:
        name: of the component in its pipeline, for messages.
        links: of its owner.
        rank: of this process.
        is_decoder: whether it makes what the pipeline returns.
        output_ranks: those that return results.
        rolling: the pipeline's runtime.

    Attributes:
        team: what this rank has to do with its calls, where several ranks compute them together.
        running: this rank is within a call of the component, whose own calls of its parts are ordinary ones.
        alone: calls are made on this rank only; see `on_this_rank`.
    """

    def __init__(
        self,
        name: str,
        links: SenderLinks,
        rank: int,
        is_decoder: bool,
        output_ranks: tuple[int, ...],
        rolling: Rolling,
    ) -> None:
        self.name = name
        self.links = links
        self.rank = rank
        self.is_decoder = is_decoder
        self.output_ranks = output_ranks
        self.rolling = rolling
        self.team: TeamWork | None = None
        self.running = False
        self.alone = False

    @property
    def is_owner(self) -> bool:
        return self.links.sender == self.rank

    @property
    def device(self) -> torch.device:
        return self.links.device

    def call(self, method: str, function: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One call of a method: on the owner `function` itself, elsewhere its result.

        Raises:
            BaseException: what it raised on the owner.
        """
        if self.running:
            return function(*args, **kwargs)
        if self.alone:
            self._refuse_elsewhere()
            return function(*args, **kwargs)
        args, kwargs = resolved(args), resolved(dict(kwargs))
        self.rolling.guard.check()
        self.rolling.guard.count_step()
        shows = self.is_decoder and DECODES.search(method) is not None
        audience = self.links.outputs if shows else self.links.everyone
        leads = self.team is None or self.team.talk.leads
        if self.team is not None and not leads:
            self._help(self.team, function, args, kwargs)
        if not self.is_owner:
            self._end_turn(RECEIVES, self._discard)
            message, flats = self._receive()
            return self._take(message, flats, args, kwargs)
        if self.team is None or leads:
            message, flats, error, result = self._run(function, args, kwargs)
        else:
            message, flats, error, result = self._from_lead(self.team, args, kwargs)
        message["shows"] = shows
        with self.watched():
            works = self.links.send(message, flats, audience)
            if self.team is not None:
                works += self.team.talk.tell_owners(message, flats)
        self._end_turn(SENDS, lambda: self._finish(works))
        self._finish(works)
        if error is not None:
            raise error
        if shows and self.rank not in self.output_ranks:
            return unpack(message["result"], lambda layout: withheld(layout, self.device))
        return result

    def _refuse_elsewhere(self) -> None:
        if self.team is not None and self.team.needs_all:
            raise ConfigError(
                f"rank {self.rank} calls the component {self.name!r} by itself, but each of several ranks has a part of it. "
                f'Leave it whole: ParallelConfig(text_encoder_tp_size={{"{self.name}": 1}}).'
            )
        if not self.is_owner:
            raise ConfigError(
                f"rank {self.rank} calls the component {self.name!r} by itself, but its weights are on rank "
                f'{self.links.sender}. Keep it on every rank: ParallelConfig(component_ranks={{"{self.name}": "all"}}).'
            )

    def _run(self, function: Call, args: Any, kwargs: Any) -> tuple[dict[str, Any], list[Any], Exception | None, Any]:
        """Run the function; what to tell the others, tensors that go with it, and what it raised or returned."""
        before, seeds = random_state(), [generator.get_state() for generator in _generators(args, kwargs)]
        message: dict[str, Any] = {}
        flats: list[torch.Tensor] = []
        result = None
        self.running = True
        try:
            if self.team is None:
                result = self._checked(function, args, kwargs)
            else:
                result = self.team.run(lambda: self._checked(function, args, kwargs))
            message["result"], flats = pack(result)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # see [Note: order on the groups of components]
            error = None
        except Exception as raised:
            error = raised
            message["error"] = portable(error, f"raised by the component {self.name!r} on rank {self.rank}")
        finally:
            self.running = False
        after = random_state()
        message["random"] = after if differ(before, after) else None
        states = [generator.get_state() for generator in _generators(args, kwargs)]
        message["seeds"] = states if differ(seeds, states) else None
        return message, flats, error, result

    def _checked(self, function: Call, args: Any, kwargs: Any) -> Any:
        refuse_withheld(f"the component {self.name!r}", args, kwargs)
        return function(*args, **kwargs)

    def _help(self, team: TeamWork, function: Call, args: Any, kwargs: Any) -> None:
        self.running = True
        try:
            team.serve(lambda: self._checked(function, args, kwargs))
        finally:
            self.running = False

    def _from_lead(self, team: TeamWork, args: Any, kwargs: Any) -> tuple[dict[str, Any], list[Any], Any, Any]:
        """What `_run` gives, from the owner in another line of ranks."""
        with self.watched():
            message, flats = team.talk.hear_lead()
        self._set_random(message, args, kwargs)
        result = None if "error" in message else unpack(message["result"], tensor_in(flats))
        return message, flats, message.get("error"), result

    def _receive(self) -> tuple[dict[str, Any], list[torch.Tensor] | None]:
        """The owner's next message, and the bytes of the result; None if there are none for this rank."""
        with self.watched():
            message = self.links.receive_header()
            audience = self.links.outputs if message["shows"] else self.links.everyone
            if "result" not in message or self.rank not in audience.ranks:
                return message, None
            return message, self.links.receive(message["result"].parts, audience)

    def _discard(self) -> None:
        self._receive()

    def _finish(self, works: Sequence[Work]) -> None:
        with self.watched():
            for work in works:
                work.wait()

    def _take(self, message: dict[str, Any], flats: list[torch.Tensor] | None, args: Any, kwargs: Any) -> Any:
        self._set_random(message, args, kwargs)
        if "error" in message:
            raise message["error"]
        packed: Packed = message["result"]
        if flats is None:
            return unpack(packed, lambda layout: withheld(layout, self.device))
        return unpack(packed, tensor_in(flats))

    def _set_random(self, message: dict[str, Any], args: Any, kwargs: Any) -> None:
        if message["random"] is not None:
            set_random_state(message["random"])
        if message["seeds"] is not None:
            for generator, state in zip(_generators(args, kwargs), message["seeds"], strict=True):
                generator.set_state(state)

    def _end_turn(self, order: int, finish: Callable[[], None]) -> None:
        """Let the others run. A request that ends here leaves no transfer behind.

        If another one fails, `finish` waits for `Rolling.drain`, which comes when all ranks have failed alike. A cancelled
        request has its turn, in order with those after it.
        """
        turns = self.rolling.turns
        turns.current().submitted += 1
        try:
            turns.end_turn()
        except OtherRequestFailedError:
            self.rolling.unfinished.append((order, finish))
            raise
        except RequestCancelledError:
            finish()
            raise

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What goes wrong with a transfer ends the run."""
        try:
            yield
        except Exception as error:
            raise self.rolling.guard.fail(error) from None


def _generators(*values: Any) -> list[torch.Generator]:
    leaves, _ = tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
