"""VAE patch parallel: the tiles of a VAE's own tiling, spread over several ranks.

[Note: tiles on other ranks]
The rank that owns the VAE (the lead) runs `decode` or `encode`; other ranks with its weights help. When the
VAE's code needs the tiles (see [Note: deferred tiles]), the owner sends each helper its share, computes its own, takes the
others' results and goes on: it is the VAE's own code that blends, so the result is that of one process, bit for bit. The
helpers serve such requests until the owner says that the call has ended. Owner and helpers do so at the same call of the
pipeline, which is where all ranks' order of calls meets, so none waits for another that is elsewhere.

A decoder may draw random numbers (that of LTX-Video 0.9.1 adds noise). Then the numbers depend on the order of the tiles,
so as soon as a tile has drawn one on any rank, the owner computes all tiles itself, from the random state at their start.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.comm.components import OwnerLinks, make_link, portable
from dit_pipelining.comm.layout import Layout
from dit_pipelining.comm.links import Work
from dit_pipelining.comm.packing import pack, tensor_in, unpack
from dit_pipelining.sharding.deferred import Recorder, parts_of, without_deferred
from dit_pipelining.sharding.tile_jobs import Job, Result, Step, run_steps
from dit_pipelining.sharding.tile_ranks import TileRanks, assign_tiles, usable_paces

LOGGER = logging.getLogger(__name__)

Task = tuple[list[Step], list[Result]]
"""A job as it travels: what to compute, and which results to return."""


@dataclass(frozen=True)
class TileLinks:
    """How the ranks of `TileRanks` talk.

    Attributes:
        helpers: by rank: from the lead to it, and back; on a helper, its own.
        owners: from the lead to the other owners; None where this rank is not one of several.
    """

    helpers: Mapping[int, tuple[OwnerLinks, OwnerLinks]]
    owners: OwnerLinks | None


def make_tile_links(
    ranks: TileRanks, layout: Layout, device: torch.device, timeout: timedelta, transport: str
) -> TileLinks:
    """Make the groups; every rank of the launch calls this alike.

    Args:
        ranks: of one VAE, in this rank's data-parallel copy.
        layout: of the launch.
        device: of this rank.
        timeout: of the groups.
        transport: how data moves between the ranks, from `choose_transport`.
    """
    rank = dist.get_rank()
    helpers = {}
    for helper in ranks.compute[1:]:
        pair = (ranks.lead, helper)
        there, back = (make_link(source, pair, layout, device, timeout, transport) for source in pair)
        if rank in pair:
            helpers[helper] = (there, back)
    owners = make_link(ranks.lead, ranks.owners, layout, device, timeout, transport)
    return TileLinks(helpers, owners if rank in ranks.owners and len(ranks.owners) > 1 else None)


def switch_on(vae: Any) -> None:
    """Switch a VAE's tiling on, and say so."""
    if not vae.use_tiling:
        vae.enable_tiling()
        if dist.get_rank() == 0:
            LOGGER.warning(
                "vae_patch_parallel_size switches the tiling of %s on, which blends the edges of its tiles.",
                type(vae).__name__,
            )


class VaeTiles:
    """Spreads the tiles of one VAE's calls over the lead and the ranks that help.

    Args:
        name: of the VAE in its pipeline, for messages.
        vae: with weights on the ranks that compute.
        ranks: that have to do with it, this one among them.
        links: between them.
        rank: of this process.
        device: of this process.
        watched: a context in which what goes wrong with a transfer ends the run.
    """

    def __init__(
        self,
        name: str,
        vae: nn.Module,
        ranks: TileRanks,
        links: TileLinks,
        rank: int,
        device: torch.device,
        watched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.name = name
        self.vae = vae
        self.ranks = ranks
        self.links = links
        self.rank = rank
        self.device = device
        self.watched = watched
        self.tiles_by_rank = [0] * len(ranks.compute)
        """On the lead: how many tiles each rank, itself first, has computed since the pipeline was spread."""
        self._recorder = Recorder(vae, self._compute)
        self._paces: dict[str, list[float]] = {}
        self._in_order = False
        self._told = False

    @property
    def leads(self) -> bool:
        """Whether the VAE's own code runs on this rank."""
        return self.rank == self.ranks.lead

    def run(self, call: Callable[[], Any]) -> Any:
        """On the lead: one call of the VAE.

        Raises:
            Exception: what it raises, here or on a helper.
        """
        try:
            with self._recorder.active():
                return without_deferred(call())
        finally:
            for there, _ in self.links.helpers.values():
                self._send(there, None)

    def serve(self) -> None:
        """On another rank: compute tiles until the lead's call has ended; at once where this rank does not help."""
        if self.rank not in self.links.helpers:
            return
        there, back = self.links.helpers[self.rank]
        parts = parts_of(self.vae)
        while True:
            tasks = self._receive(there)
            if tasks is None:
                return
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                answer = self._timed(tasks, parts)
            if answer["error"] is not None:
                note = f"raised by a tile of the component {self.name!r} on rank {self.rank}"
                answer["error"] = portable(answer["error"], note)
            self._send(back, answer)
            del tasks, answer

    def tell_owners(self, message: Any, flats: Sequence[torch.Tensor]) -> list[Work]:
        """On the lead: post what a call gave to the owners in other lines of ranks."""
        link = self.links.owners
        return link.send(message, flats, link.everyone) if link is not None and self.leads else []

    def hear_lead(self) -> tuple[Any, list[torch.Tensor]]:
        """On an owner in another line of ranks: what the lead's call gave."""
        link = self.links.owners
        assert link is not None  # an owner that does not lead is one of several
        message = link.receive_header()
        parts = message["result"].parts if "result" in message else ()
        return message, link.receive(parts, link.everyone)

    def _compute(self, jobs: list[Job]) -> None:
        """Run jobs here and on the helpers; for `Recorder`."""
        if len(jobs) < len(self.ranks.compute):
            self._tell_of_few_tiles(len(jobs))
        if len(jobs) == 1 or self._in_order:
            self._compute_here(jobs)
            return
        kind = jobs[0].steps[0].target
        paces = self._paces.setdefault(kind, [math.inf] * len(self.ranks.compute))
        ranks = assign_tiles([job.cost for job in jobs], usable_paces(paces))
        shares = [[job for job, rank in zip(jobs, ranks, strict=True) if rank == i] for i in range(len(paces))]
        state = _random_state(self.device)
        contents = [(own, list(own)) for job in shares[0] for own in job.lists]
        helpers = [(*link, share) for link, share in zip(self.links.helpers.values(), shares[1:], strict=True) if share]
        works = [self._start(there, [_task(job) for job in share]) for there, _, share in helpers]
        answers = [self._timed([_task(job, here=True) for job in shares[0]], self._recorder.parts)]
        for own in works:
            self._finish(own)
        answers += [self._receive(back) for _, back, _ in helpers]
        if any(answer["draws"] for answer in answers):
            _set_random_state(self.device, state)
            for own, before in contents:
                own[:] = before
            self._in_order = True
            LOGGER.warning(
                "the tiles of %r draw random numbers, so one rank computes them in their order: vae_patch_parallel_size "
                "makes this VAE no faster.",
                self.name,
            )
            self._compute_here(jobs)
            return
        computed = [share for share in shares if share]
        _raise_first(jobs, computed, answers)
        for share, answer in zip(computed, answers, strict=True):
            number = shares.index(share)
            paces[number] = min(paces[number], answer["seconds"] / max(sum(job.cost for job in share), 1))
            self.tiles_by_rank[number] += len(share)
            for job, values in zip(share, answer["values"], strict=True):
                job.give(values, here=number == 0)

    def _compute_here(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.give(run_steps(*_task(job, here=True), self._recorder.parts), here=True)
        self.tiles_by_rank[0] += len(jobs)

    def _timed(self, tasks: Sequence[Task], parts: Mapping[str, nn.Module]) -> dict[str, Any]:
        """Compute tasks; their results, how long they took, whether they drew random numbers, and what one raised."""
        before, started = _random_state(self.device), time.perf_counter()
        values: list[dict[Result, Any]] = []
        error = None
        try:
            for steps, wanted in tasks:
                values.append(run_steps(steps, wanted, parts))
        except Exception as raised:
            error = raised
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # see [Note: order on the groups of components]
        seconds = time.perf_counter() - started
        draws = any(not torch.equal(*pair) for pair in zip(before, _random_state(self.device), strict=True))
        return {"values": values, "seconds": seconds, "draws": draws, "error": error}

    def _tell_of_few_tiles(self, count: int) -> None:
        if not self._told:
            self._told = True
            LOGGER.warning(
                "the component %r has %d tile(s) at this size for %d ranks; smaller tiles (its attributes tile_...) use all.",
                *(self.name, count, len(self.ranks.compute)),
            )

    def _start(self, link: OwnerLinks, value: Any) -> Any:
        packed, flats = pack(value)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        with self.watched():
            return link.send(packed, flats, link.everyone), flats

    def _finish(self, started: Any) -> None:
        works, _ = started
        with self.watched():
            for work in works:
                work.wait()

    def _send(self, link: OwnerLinks, value: Any) -> None:
        self._finish(self._start(link, value))

    def _receive(self, link: OwnerLinks) -> Any:
        with self.watched():
            packed = link.receive_header()
            return unpack(packed, tensor_in(link.receive(packed.parts, link.everyone)))


def _task(job: Job, *, here: bool = False) -> Task:
    return job.steps, [*job.wanted(), *(job.kept() if here else [])]


def _raise_first(jobs: Sequence[Job], shares: Sequence[Sequence[Job]], answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise what the first tile that failed has raised, as one process would."""
    failed = [
        (jobs.index(share[len(answer["values"])]), answer["error"])
        for share, answer in zip(shares, answers, strict=True)
        if answer["error"] is not None
    ]
    if failed:
        raise min(failed, key=lambda pair: pair[0])[1]


def _random_state(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_state(device: torch.device, state: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
