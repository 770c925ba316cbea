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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dit_pipelining.comm.portable_errors import portable
from dit_pipelining.random_state import differ, random_state, set_random_state
from dit_pipelining.sharding.deferred import Recorder, parts_of, without_deferred
from dit_pipelining.sharding.teams import Talk
from dit_pipelining.sharding.tile_jobs import Job, Result, Step, run_steps
from dit_pipelining.sharding.tile_ranks import assign_tiles, usable_paces

LOGGER = logging.getLogger(__name__)

Task = tuple[list[Step], list[Result]]
"""A job as it travels: what to compute, and which results to return."""


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
        talk: with the ranks that have to do with it.
    """

    needs_all = False

    def __init__(self, name: str, vae: nn.Module, talk: Talk) -> None:
        self.name = name
        self.vae = vae
        self.talk = talk
        self.device = talk.device
        self.tiles_by_rank = [0] * len(talk.team.compute)
        """On the lead: how many tiles each rank, itself first, has computed since the pipeline was spread."""
        self._recorder = Recorder(vae, self._compute)
        self._paces: dict[str, list[float]] = {}
        self._in_order = False
        self._told = False

    def run(self, call: Callable[[], Any]) -> Any:
        """On the lead: one call of the VAE.

        Raises:
            Exception: what it raises, here or on a helper.
        """
        try:
            with self._recorder.active():
                return without_deferred(call())
        finally:
            for there, _ in self.talk.links.helpers.values():
                self.talk.send(there, None)

    def serve(self, call: Callable[[], Any]) -> None:
        """On another rank: compute tiles until the lead's call has ended; at once where this rank does not help."""
        if self.talk.own is None:
            return
        there, back = self.talk.own
        parts = parts_of(self.vae)
        while True:
            tasks = self.talk.receive(there)
            if tasks is None:
                return
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                answer = self._timed(tasks, parts)
            if answer["error"] is not None:
                note = f"raised by a tile of the component {self.name!r} on rank {self.talk.rank}"
                answer["error"] = portable(answer["error"], note)
            self.talk.send(back, answer)
            del tasks, answer

    def _compute(self, jobs: list[Job]) -> None:
        """Run jobs here and on the helpers; for `Recorder`."""
        if len(jobs) < len(self.talk.team.compute):
            self._tell_of_few_tiles(len(jobs))
        if len(jobs) == 1 or self._in_order:
            self._compute_here(jobs)
            return
        kind = jobs[0].steps[0].target
        paces = self._paces.setdefault(kind, [math.inf] * len(self.talk.team.compute))
        ranks = assign_tiles([job.cost for job in jobs], usable_paces(paces))
        shares = [[job for job, rank in zip(jobs, ranks, strict=True) if rank == i] for i in range(len(paces))]
        state = random_state(self.device)
        contents = [(own, list(own)) for job in shares[0] for own in job.lists]
        helpers = [
            (*link, share) for link, share in zip(self.talk.links.helpers.values(), shares[1:], strict=True) if share
        ]
        works = [self.talk.start(there, [_task(job) for job in share]) for there, _, share in helpers]
        answers = [self._timed([_task(job, here=True) for job in shares[0]], self._recorder.parts)]
        for own in works:
            self.talk.finish(own)
        answers += [self.talk.receive(back) for _, back, _ in helpers]
        if any(answer["draws"] for answer in answers):
            set_random_state(state, self.device)
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
        before, started = random_state(self.device), time.perf_counter()
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
        draws = differ(before, random_state(self.device))
        return {"values": values, "seconds": seconds, "draws": draws, "error": error}

    def _tell_of_few_tiles(self, count: int) -> None:
        if not self._told:
            self._told = True
            LOGGER.warning(
                "the component %r has %d tile(s) at this size for %d ranks; smaller tiles (its attributes tile_...) use all.",
                *(self.name, count, len(self.talk.team.compute)),
            )


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
