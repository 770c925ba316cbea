"""StreamRank: one stage of a pipeline over ranks, and the messages that it gets and sends.

[Note: order of a rank]
A rank takes its messages in the order in which they come, and does everything a message asks for before the next: so all
ranks see rows, prompt changes and rebalances in one order, that of the first rank. Only the last stage's latents go back.
They are needed W ticks later, and messages of one direction stay in order, so no rank waits for what depends on itself.
"""

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from dit_pipelining.comm.message_link import Direction, Layout, Message, Receiver, Sender, receive_one
from dit_pipelining.stream.head import Source, StreamHead, Tick, given_streams, returned_rows
from dit_pipelining.stream.links import StreamLinks
from dit_pipelining.stream.micro_step import NOTED, Header, Kind, MicroStep, decode, encode, header_length, noted
from dit_pipelining.stream.noise import NoiseSource
from dit_pipelining.stream.rebalance import Rebalancing, stages_of_blocks
from dit_pipelining.stream.stage import StreamStage
from dit_pipelining.stream.tail import FinishedChunk, StreamTail
from dit_pipelining.torch_internals import storage_key
from partitioners import Partition

REBALANCE_TICKS = 16
"""How often the first rank looks whether blocks had better move."""

IDLE_SECONDS = 0.001
"""How long the first stage sleeps while its sources have nothing."""

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
    ) -> None:
        self.stage = stage
        self.index = index
        self.num_stages = num_stages
        self.links = links
        self.noise = noise
        self.seconds = seconds
        self.rebalancing = rebalancing
        self.noted = torch.zeros(num_stages, NOTED, dtype=torch.float64)
        self._length = header_length(stage.spec, num_stages)
        self._senders: list[Sender] = []
        self._receivers: list[Receiver] = []

    def run(self, sources: Sequence[Source]) -> Iterator[FinishedChunk]:
        """Run until the sources end; all ranks call this, and iterate to the end.

        Args:
            sources: what each stream is made of; only the first rank looks at them.

        Yields:
            on the last rank finished chunks, as soon as they are; on the others nothing.
        """
        yield from self._lead(sources) if self.index == 0 else self._follow()
        for sender in self._senders:
            sender.close()
        for receiver in self._receivers:
            receiver.close()
        self._senders, self._receivers = [], []

    # ---- the first rank -------------------------------------------------------------------------------------------------

    def _lead(self, sources: Sequence[Source]) -> Iterator[FinishedChunk]:
        head = StreamHead(self.stage.spec, self.num_stages, self.noise, sources)
        onward, fresh = self._sender(self.links.hops[0]), self._sender(self.links.fresh)
        back = self._receiver(self.links.back)
        spoken = time.monotonic()
        while not head.finished:
            tick = head.next_tick()
            if tick.step is None:
                time.sleep(IDLE_SECONDS)
                if time.monotonic() - spoken > self.seconds / SIGNS_PER_TIMEOUT:
                    onward.send(self._header(Kind.IDLE))
                    spoken = time.monotonic()
                continue
            spoken = time.monotonic()
            self._lead_tick(head, tick, onward, fresh, back)
        onward.send(self._header(Kind.END))
        kind = Kind.IDLE
        while kind is not Kind.END:  # until it has gone around
            with back.next() as message:
                kind = decode(message.header).kind
        yield from ()

    def _lead_tick(self, head: StreamHead, tick: Tick, onward: Sender, fresh: Sender, back: Receiver) -> None:
        assert tick.step is not None
        if self.rebalancing is not None and tick.step.tick % REBALANCE_TICKS == REBALANCE_TICKS - 1:
            seconds = tuple(self.noted[:, 1].tolist())
            if (partition := self.rebalancing.better_partition(seconds)) is not None:
                onward.send(encode(Header(Kind.REBALANCE, numbers=seconds), self._length))
                self._move(partition)
        for stream, chunk, prompt in tick.prompts:
            self.stage.prompts.change(stream, chunk, prompt)
            onward.send(encode(Header(Kind.PROMPT, numbers=(stream, chunk)), self._length), [prompt])
        header = encode(Header(Kind.ROWS, tick.step), self._length)
        self._note(header)
        if tick.fresh:
            latents = torch.cat([own for _, own in tick.fresh]).to(self.noise.device, self.noise.dtype)
            fresh.send(header, [latents])
        while back.has_message or not head.has_latents(tick.step):
            with back.next() as message:
                step = decode(message.header).micro_step
                if step is not None:
                    self.noted = noted(message.header, self.num_stages)
                if message.tensors and step is not None:
                    head.take_back(step, message.tensors[0].clone())
        outputs = self.stage.execute_micro_step(tick.step, [], head.latents(tick.step, tick.fresh))
        onward.send(header, outputs)

    # ---- all others -----------------------------------------------------------------------------------------------------

    def _follow(self) -> Iterator[FinishedChunk]:
        is_last = self.index == self.num_stages - 1
        incoming = self._receiver(self.links.hops[self.index - 1])
        onward = self._sender(self.links.back if is_last else self.links.hops[self.index])
        tail = StreamTail(self.stage.spec, self.noise) if is_last else None
        kind = Kind.IDLE
        while kind is not Kind.END:
            finished: list[FinishedChunk] = []
            with incoming.next() as message:
                header = decode(message.header)
                kind = header.kind
                if header.micro_step is not None:
                    self._note(message.header)
                    outputs = self.stage.execute_micro_step(header.micro_step, message.tensors)
                    if tail is None:
                        onward.send(message.header, _own(outputs, message))
                    else:
                        fresh = self._fresh(header.micro_step)
                        finished, going_on = tail.finish(header.micro_step, torch.cat(outputs), fresh)
                        if going_on is not None or self.rebalancing is not None:
                            onward.send(message.header, [] if going_on is None else [going_on])
                elif kind is Kind.PROMPT:
                    prompt = message.tensors[0].clone()
                    stream, chunk = header.numbers
                    self.stage.prompts.change(int(stream), int(chunk), prompt)
                    if not is_last:
                        onward.send(message.header, [prompt])
                else:
                    onward.send(message.header)
            if kind is Kind.REBALANCE:
                assert self.rebalancing is not None
                partition = self.rebalancing.better_partition(header.numbers)  # what it was on the first rank
                assert partition is not None
                self._move(partition)
            yield from finished

    def _fresh(self, step: MicroStep) -> list[tuple[int, torch.Tensor]]:
        """What sources gave for first passes in this step, by stream."""
        streams = given_streams(step)
        if not streams:
            return []
        layout = ((len(streams), *self.noise.shape[1:]), self.noise.dtype)
        (latents,) = receive_one(self.links.fresh, self._length, [layout], self.stage.device)
        return list(zip(streams, latents.split(1), strict=True))

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

    # ---- messages -------------------------------------------------------------------------------------------------------

    def _header(self, kind: Kind) -> torch.Tensor:
        return encode(Header(kind), self._length)

    def _sender(self, direction: Direction) -> Sender:
        self._senders.append(Sender(direction, self.stage.device))
        return self._senders[-1]

    def _receiver(self, direction: Direction) -> Receiver:
        layouts = self._returned if direction is self.links.back else self._announced
        end = float(Kind.END)
        self._receivers.append(
            Receiver(
                direction,
                self.stage.device,
                self._length,
                layouts,
                lambda header: float(header[0]) == end,
                self.seconds,
            )
        )
        return self._receivers[-1]

    def _announced(self, header: torch.Tensor) -> list[Layout]:
        """What the stage before sends after this header."""
        known = decode(header)
        if known.micro_step is not None:
            return self.stage.received(len(known.micro_step.rows))
        prompt = self.stage.prompts.example
        return [(tuple(prompt.shape), prompt.dtype)] if known.kind is Kind.PROMPT else []

    def _returned(self, header: torch.Tensor) -> list[Layout]:
        """What the last stage sends back after this header."""
        step = decode(header).micro_step
        count = len(returned_rows(step, self.stage.spec)) if step is not None else 0
        return [((count, *self.noise.shape[1:]), self.noise.dtype)] if count else []


def _own(outputs: Sequence[torch.Tensor], message: Message) -> list[torch.Tensor]:
    """What a stage only passes on lies in the buffer of the message it came with, which is used again."""
    lent = {storage_key(tensor) for tensor in message.tensors}
    return [tensor.clone() if storage_key(tensor) in lent else tensor for tensor in outputs]
