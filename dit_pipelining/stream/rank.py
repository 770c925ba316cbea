"""StreamRank: one stage of a pipeline over ranks, and the messages that it gets and sends.

[Note: order of a rank]
A rank takes its messages in the order in which they come, and does everything a message asks for before the next: so all
ranks see rows, prompt changes and rebalances in one order, that of the first rank. Only the last stage's latents go back.
They are needed W ticks later, and messages of one direction stay in order, so no rank waits for what depends on itself.
"""

import time
from collections.abc import Generator, Iterator, Sequence

import torch
import torch.distributed as dist

from dit_pipelining.comm.messages import Direction, Message
from dit_pipelining.stream.ends import AnyReceiver, AnySender, Ends, until_the_end
from dit_pipelining.stream.finishing import Finishing
from dit_pipelining.stream.head import Levels, Source, StreamHead, Tick
from dit_pipelining.stream.levels import change_levels
from dit_pipelining.stream.links import StreamLinks
from dit_pipelining.stream.micro_step import (
    NOTED,
    Header,
    Kind,
    MicroStep,
    decode,
    encode,
    header_length,
    noted,
    set_following,
)
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.one_process import IDLE_SECONDS
from dit_pipelining.stream.rebalance import Rebalancing, stages_of_blocks
from dit_pipelining.stream.stage import StreamStage
from dit_pipelining.stream.tail import FinishedChunk
from dit_pipelining.torch_internals import storage_key
from partitioners import Partition

REBALANCE_TICKS = 16
"""How often the first rank looks whether blocks had better move."""

SIGNS_PER_TIMEOUT = 4
"""How often an idle first rank says that it is there, within the time after which others give up."""


class StreamRank:
    """This rank's part of a pipeline of two stages or more.

    Args:
        stage: of this rank.
        index: of the stage.
        num_stages: of the pipeline.
        links: to the other ranks.
        noise: the noise of chunks.
        seconds: how long to wait for another rank.
        rebalancing: decides when blocks move; None: never.
        is_twin: this rank is of the pipeline that runs the rows without the prompt.
        guidance_scale: with a twin; the spec of the stages knows of no guidance then.

    Attributes:
        noted: load and seconds per tick of each stage, as far as this rank knows: the last one knows all, the first one a
            little later.
    """

    def __init__(
        self,
        stage: StreamStage,
        index: int,
        num_stages: int,
        links: StreamLinks,
        noise: NoiseSource,
        seconds: float,
        rebalancing: Rebalancing | None = None,
        is_twin: bool = False,
        guidance_scale: float | None = None,
    ) -> None:
        self.stage = stage
        self.index = index
        self.num_stages = num_stages
        self.links = links
        self.noise = noise
        self.seconds = seconds
        self.rebalancing = rebalancing
        self.is_twin = is_twin
        self.guidance_scale = guidance_scale
        self.noted = torch.zeros(num_stages, NOTED, dtype=torch.float64)
        self._length = header_length(stage.spec, num_stages)
        self._ends = Ends(links, stage, noise, self._length, seconds)
        self._unheard = 0

    def run(self, sources: Sequence[Source], levels: Levels | None = None) -> Generator[FinishedChunk, None, None]:
        """Run until the sources end; all ranks call this, and iterate to the end.

        Args:
            sources: what each stream is made of; only the first rank looks at them.
            levels: changes the noise levels while the streams run, on the first rank; None on all: they stay.

        Yields:
            on the last rank finished chunks, as soon as they are; on the others nothing.
        """
        yield from self._lead(sources, levels) if self.index == 0 and not self.is_twin else self._follow()
        self._ends.close()

    # ---- the first rank -------------------------------------------------------------------------------------------------

    def _lead(self, sources: Sequence[Source], levels: Levels | None) -> Iterator[FinishedChunk]:
        links = self.links
        head = StreamHead(self.stage.spec, self.num_stages, self.noise, sources, levels)
        self._unheard = 0
        onward = self._ends.sender(links.hops[0]) if links.hops else None
        fresh = self._ends.sender(links.fresh) if links.fresh is not None else None
        back = self._ends.receiver(links.back) if links.back is not None else None
        twin = self._ends.sender(links.twin) if links.twin is not None else None
        finishing = self._finishing() if onward is None else None
        followers = [sender for sender in (onward, twin) if sender is not None]
        every = [sender for sender in (onward, twin, fresh) if sender is not None]
        spoken = time.monotonic()
        while not head.finished:
            self.stage.wait_for_room()
            tick = head.next_tick(float(self.noted[:, 0].max()))
            if tick.levels:
                for follower in followers:
                    follower.send(encode(Header(Kind.LEVELS, numbers=tick.levels), self._length))
                self._change_levels(tick.levels, finishing)
                continue
            if tick.step is None:
                time.sleep(IDLE_SECONDS)
                if time.monotonic() - spoken > self.seconds / SIGNS_PER_TIMEOUT:
                    for follower in followers:
                        follower.send(self._ends.header(Kind.IDLE))
                    spoken = time.monotonic()
                continue
            spoken = time.monotonic()
            self._announce(tick, onward)
            header = encode(Header(Kind.ROWS, tick.step), self._length)
            self._note(header)
            if tick.fresh and fresh is not None:
                latents = torch.cat([own for _, own in tick.fresh]).to(self.noise.device, self.noise.dtype)
                fresh.send(header, [latents])
            if back is not None:
                self._take_back(head, tick.step, back)
                self._unheard += 1
            latents = head.latents(tick.step, tick.fresh)
            if twin is not None:
                twin.send(header, [latents])
            outputs = self.stage.execute_micro_step(tick.step, [], latents)
            if finishing is not None:
                finished, going_on = finishing.finish(tick.step, outputs, tick.fresh)
                if going_on is not None:
                    head.take_back(tick.step, going_on)
                yield from finished
            elif onward is not None:
                onward.send(header, outputs)
        for sender in every:
            sender.send(self._ends.header(Kind.END))
        if back is not None:
            until_the_end(back)
        if finishing is not None:
            finishing.close()

    def _announce(self, tick: Tick, onward: AnySender | None) -> None:
        """What the other ranks have to know before the rows of a tick."""
        assert tick.step is not None
        if self.rebalancing is not None and tick.step.tick % REBALANCE_TICKS == REBALANCE_TICKS - 1:
            seconds = tuple(self.noted[:, 1].tolist())
            if (partition := self.rebalancing.better_partition(seconds)) is not None and onward is not None:
                onward.send(encode(Header(Kind.REBALANCE, numbers=seconds), self._length))
                self._move(partition)
        for stream, chunk, prompt in tick.prompts:
            self.stage.prompts.change(stream, chunk, prompt)
            if onward is not None:
                onward.send(encode(Header(Kind.PROMPT, numbers=(stream, chunk)), self._length), [prompt])

    def _take_back(self, head: StreamHead, step: MicroStep, back: AnyReceiver) -> None:
        """Take what has come back, and wait for what the rows of a step need.

        Also where they need nothing, no more ticks than there are stages go unheard of: a source that is ahead of what
        comes out makes latency. And nothing of later ticks is taken: where tensors take peer copies, a header says what
        will be, not what is there.
        """

        def is_due() -> bool:
            header = back.peek()
            known = None if header is None else decode(header).micro_step
            return header is not None and (known is None or known.tick <= step.tick - self.num_stages)

        while not head.has_latents(step) or self._unheard > self.num_stages or is_due():
            with back.next() as message:
                known = decode(message.header).micro_step
                if known is not None:
                    self._unheard -= 1
                    self.noted = noted(message.header, self.num_stages)
                if known is not None and message.tensors:
                    head.take_back(known, message.tensors[0].clone())

    # ---- all others -----------------------------------------------------------------------------------------------------

    def _follow(self) -> Iterator[FinishedChunk]:
        is_last = self.index == self.num_stages - 1
        incoming = self._ends.receiver(self._upstream())
        onward = self._ends.sender(self._downstream())
        finishing = self._finishing() if is_last and not self.is_twin else None
        kind = Kind.IDLE
        while kind is not Kind.END:
            finished: list[FinishedChunk] = []
            self.stage.wait_for_room()
            with incoming.next() as message:
                header = decode(message.header)
                kind = header.kind
                if header.micro_step is not None:
                    self._note(message.header)
                    outputs = self._execute(header.micro_step, message)
                    if finishing is not None:
                        finished, going_on = finishing.finish(header.micro_step, outputs)
                        onward.send(*_returned(message.header, going_on))
                    else:
                        onward.send(message.header, [torch.cat(outputs)] if is_last else _own(outputs, message))
                elif kind is Kind.PROMPT:
                    prompt = message.tensors[0].clone()
                    stream, chunk = header.numbers
                    self.stage.prompts.change(int(stream), int(chunk), prompt)
                    if not is_last:
                        onward.send(message.header, [prompt])
                else:
                    onward.send(message.header)
            if kind is Kind.LEVELS:
                self._change_levels(header.numbers, finishing)
            if kind is Kind.REBALANCE:
                assert self.rebalancing is not None
                partition = self.rebalancing.better_partition(header.numbers)  # what it was on the first rank
                assert partition is not None
                self._move(partition)
            yield from finished
        if finishing is not None:
            finishing.close()

    def _upstream(self) -> Direction:
        direction = self.links.hops[self.index - 1] if self.index else self.links.twin
        assert direction is not None
        return direction

    def _downstream(self) -> Direction:
        is_last = self.index == self.num_stages - 1
        direction = self.links.hops[self.index] if not is_last else self.links.flow if self.is_twin else self.links.back
        assert direction is not None
        return direction

    def _execute(self, step: MicroStep, message: Message) -> list[torch.Tensor]:
        if self.index == 0:  # of the twin
            return self.stage.execute_micro_step(step, [], message.tensors[0].clone())
        return self.stage.execute_micro_step(step, message.tensors)

    def _finishing(self) -> Finishing:
        return Finishing(self._ends, self.noise, self.guidance_scale)

    def _change_levels(self, levels: Sequence[float], finishing: Finishing | None) -> None:
        """Nothing is in flight: the first rank waited until all chunks had come out, or gone to their last pass."""
        spec = change_levels([self.stage], levels)
        if finishing is not None:
            finishing.tail.spec = spec

    # ---- moving blocks -----------------------------------------------------------------------------------------------

    def _move(self, partition: Partition) -> None:
        """Move blocks, their weights, keys and values; all ranks are here.

        A rank comes here when it has done everything before the message, so nothing is in flight between the stages;
        the latents that the last one sent back wait at the first one. Rows go on when all have their new blocks.
        """
        assert self.rebalancing is not None
        split = self.rebalancing.move(partition)
        ranks = [self.links.hops[0].source, *(hop.target for hop in self.links.hops)]
        before, after = stages_of_blocks(self.stage.split), stages_of_blocks(split)
        self.stage.caches.move(before, after, ranks, self.links.control, self.stage.device)
        self.stage.rebuild(split, self.index)
        dist.barrier(group=self.links.control)

    def _note(self, header: torch.Tensor) -> None:
        self.noted = noted(header, self.num_stages)
        self.noted[self.index, 0] = self.stage.load()
        self.noted[self.index, 1] = 0.0 if self.rebalancing is None else self.rebalancing.seconds_per_tick() or 0.0


def _returned(header: torch.Tensor, going_on: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The message with the rows that go on; its header says how many, since levels may change until it is read."""
    set_following(header, 0 if going_on is None else len(going_on))
    return header, [] if going_on is None else [going_on]


def _own(outputs: Sequence[torch.Tensor], message: Message) -> list[torch.Tensor]:
    """What a stage only passes on lies in the buffer of the message it came with, which is used again."""
    lent = {storage_key(tensor) for tensor in message.tensors}
    return [tensor.clone() if storage_key(tensor) in lent else tensor for tensor in outputs]
