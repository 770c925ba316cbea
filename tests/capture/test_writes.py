"""Writes in place: a split does them as often and in the same order as the model."""

import pytest
import torch
from torch import nn

from dit_pipelining.api import split_model
from dit_pipelining.capture.capturing import capture
from dit_pipelining.errors import CaptureError
from tests.capture.toy import DIM, Block, Toy, all_cuts, assert_splits_exactly, hidden, randn


class WritesBetweenBlocks(Toy):
    def write(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(hidden_states)
        for block in self.blocks:
            x = block(x)
            self.write(x)
        return self.proj_out(x)


class Adds(WritesBetweenBlocks):
    def write(self, x: torch.Tensor) -> None:
        x += 1


class SetsItems(WritesBetweenBlocks):
    def write(self, x: torch.Tensor) -> None:
        x[..., 0] = 0
        x[:, 1:] = x[:, :-1].clone()


class CopiesThroughData(WritesBetweenBlocks):
    def write(self, x: torch.Tensor) -> None:
        x.data.copy_(x.data * 2)


class CopiesThroughASliceOfData(WritesBetweenBlocks):
    def write(self, x: torch.Tensor) -> None:
        x.data[..., 2:].copy_(x[..., :-2].clone())


class Divides(WritesBetweenBlocks):
    def write(self, x: torch.Tensor) -> None:
        x.div_(3).clamp_(min=-1)


class WritesThroughAView(WritesBetweenBlocks):
    def write(self, x: torch.Tensor) -> None:
        x.flatten(1)[:, ::2].mul_(-1)


class WritesByOut(WritesBetweenBlocks):
    def write(self, x: torch.Tensor) -> None:
        torch.mul(x, 2, out=x)


class WritesByInplaceModule(WritesBetweenBlocks):
    relu = nn.ReLU(inplace=True)

    def write(self, x: torch.Tensor) -> None:
        self.relu(x)


class SetsData(WritesBetweenBlocks):
    def write(self, x: torch.Tensor) -> None:
        x.data = x.data * 2


class WritesByScatter(WritesBetweenBlocks):
    def write(self, x: torch.Tensor) -> None:
        x.index_fill_(1, torch.tensor([0, 2]), 0.5)
        x.masked_fill_(x > 1, 0)


@pytest.mark.parametrize(
    "cls",
    [
        Adds,
        SetsItems,
        CopiesThroughData,
        CopiesThroughASliceOfData,
        Divides,
        WritesThroughAView,
        WritesByOut,
        WritesByInplaceModule,
        SetsData,
        WritesByScatter,
    ],
)
def test_a_write_between_blocks_is_part_of_the_split(cls: type[WritesBetweenBlocks]) -> None:
    assert_splits_exactly(cls(3))


class WritesIntoLatents(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states *= 2
        x = self.blocks[0](hidden_states)
        return self.blocks[1](x + hidden_states)


@pytest.mark.parametrize("counts", list(all_cuts(2)))
def test_a_write_into_an_input_does_not_reach_the_caller_and_happens_once(counts: tuple[int, ...]) -> None:
    model = WritesIntoLatents(2)
    with torch.no_grad():
        expected = model(hidden()["hidden_states"])
        split = split_model(model, 2, hidden(), counts=counts)
        given = hidden()["hidden_states"]
        for _ in range(2):
            assert torch.equal(split(given), expected)
        assert torch.equal(given, hidden()["hidden_states"])


class WritesIntoAViewOfAnInput(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        first = hidden_states[:, 0]
        first.add_(1)
        x = self.blocks[0](hidden_states)
        return self.blocks[1](x + first[:, None])


def test_a_write_into_a_view_of_an_input_counts_as_one_into_the_input() -> None:
    model = WritesIntoAViewOfAnInput(2)
    with torch.no_grad():
        expected = model(hidden()["hidden_states"])
        split = split_model(model, 2, hidden(), partitioner="uniform")
        given = hidden()["hidden_states"]
        assert torch.equal(split(given), expected)
        assert torch.equal(given, hidden()["hidden_states"])


class BlockThatWritesItsInput(Block):
    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x.mul_(0.5)
        return super().forward(x, context)


class RunsWritingBlocks(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.proj_out(self.run_blocks(self.proj_in(hidden_states)))


def test_a_block_may_write_into_its_input() -> None:
    assert_splits_exactly(RunsWritingBlocks(3, BlockThatWritesItsInput))


class RunsWritingBlocksOnLatents(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states)


def test_a_block_that_writes_into_the_latents_writes_into_a_copy() -> None:
    model = RunsWritingBlocksOnLatents(2, BlockThatWritesItsInput)
    with torch.no_grad():
        expected = model(hidden()["hidden_states"])
        given = hidden()["hidden_states"]
        assert torch.equal(split_model(model, 2, hidden(), partitioner="uniform")(given), expected)
        assert torch.equal(given, hidden()["hidden_states"])


class BlockThatOnlyWrites(Block):
    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        x += self.linear(x)


class RunsBlocksThatOnlyWrite(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(hidden_states)
        for block in self.blocks:
            block(x)
        return self.proj_out(x)


def test_a_block_may_do_nothing_but_write_into_its_input() -> None:
    assert_splits_exactly(RunsBlocksThatOnlyWrite(3, BlockThatOnlyWrites))


class ViewsAroundAWrite(Toy):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.blocks[0](hidden_states)
        before = x[..., 0]
        copied = x[..., 0] * 1
        x[..., 0] = 7
        after = x[..., 0]
        y = self.blocks[1](x)
        return y + before[..., None] + copied[..., None], after, before, copied


def test_views_see_a_write_and_copies_do_not() -> None:
    assert_splits_exactly(ViewsAroundAWrite(2))


class ReadsBeforeTheWriteInALaterStage(Toy):
    """The second block's result meets the first one's before that is overwritten, and the third reads both."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](hidden_states)
        y = self.blocks[1](x)
        before = x * y
        x.add_(1)
        return self.blocks[2](before + x)


def test_a_stage_reads_a_value_before_a_write_that_comes_later_in_the_forward() -> None:
    assert_splits_exactly(ReadsBeforeTheWriteInALaterStage(3))


class WritesUnderAView(Toy):
    """Views of the first block's result are overwritten while the second block's stage holds them."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](hidden_states)
        view = x[..., :4]
        left, right = x.chunk(2, dim=-1)
        y = self.blocks[1](x)
        x.mul_(2)
        right.add_(y[..., 4:])
        return self.blocks[2](y + x + torch.cat([view, left], -1) + torch.cat([right, right], -1))


def test_views_that_were_taken_on_an_earlier_stage_see_a_write() -> None:
    assert_splits_exactly(WritesUnderAView(3))


class BlockReadsBeforeTheWrite(Toy):
    """The skip is given to a block, then overwritten, then used again."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        skip = self.blocks[0](hidden_states)
        x = self.blocks[1](hidden_states, skip)
        x = self.blocks[2](x, skip)
        skip.zero_()
        return self.blocks[3](x, skip)


def test_a_long_skip_may_be_overwritten_after_its_use() -> None:
    assert_splits_exactly(BlockReadsBeforeTheWrite(4))


class ReadsThePrologueBeforeTheWrite(Toy):
    """A small value that is worth sending is read, overwritten for the first block, and read by the last in both forms."""

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        time = self.text(timestep)
        before = time * 2
        view = time[..., :1]
        time.add_(1)
        x = self.run_blocks(hidden_states, time)
        return x + before + view


def test_a_small_value_that_is_overwritten_is_right_on_later_stages() -> None:
    assert_splits_exactly(
        ReadsThePrologueBeforeTheWrite(3),
        lambda: dict(hidden_states=randn(8, 64, DIM), timestep=randn(1, 1, DIM, seed=1)),
    )


class WritesIntoThePrologue(Toy):
    """A step-invariant value is written into, and both forms are used."""

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        context = self.text(text)
        x = self.blocks[0](hidden_states, context)
        context.add_(1)
        x = self.blocks[1](x, context)
        context[:, 0] = 0
        return self.blocks[2](x, context)


def test_a_step_invariant_value_that_is_written_into_is_right_in_every_call() -> None:
    assert_splits_exactly(WritesIntoThePrologue(3), lambda: hidden() | dict(text=TEXT))


TEXT = randn(1, 4, DIM, seed=1)
"""The same tensor in every call, so that what depends on it alone is kept."""


class AccumulatesIntoAKeptBuffer(Toy):
    """An accumulator that starts as a step-invariant value."""

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(text)
        x = hidden_states
        for block in self.blocks:
            x = block(x)
            total += x[:1]
        return x + total + text


def test_an_accumulator_starts_from_nothing_in_every_call() -> None:
    assert_splits_exactly(AccumulatesIntoAKeptBuffer(3), lambda: hidden() | dict(text=TEXT))


class BlockWritesItsContext(Block):
    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        assert context is not None
        context += 1
        return super().forward(x, context)


class SharesAWrittenContext(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states, self.text(text))


def test_blocks_may_write_into_a_step_invariant_context_that_they_share() -> None:
    assert_splits_exactly(SharesAWrittenContext(3, BlockWritesItsContext), lambda: hidden() | dict(text=TEXT))


class ReturnsTheContext(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run_blocks(hidden_states), self.text(text)


def test_a_caller_may_write_into_a_returned_step_invariant_value() -> None:
    model = ReturnsTheContext(2)
    inputs = hidden() | dict(text=TEXT)
    with torch.no_grad():
        _, expected = model(**inputs)
        split = split_model(model, 2, inputs, partitioner="uniform")
        for _ in range(3):
            _, context = split(**inputs)
            assert torch.equal(context, expected)
            context.zero_()


class WritesIntoABuffer(Toy):
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.run_blocks(hidden_states + self.steps)


def test_a_write_into_a_buffer_is_refused_with_its_name_and_line() -> None:
    with pytest.raises(CaptureError, match=r"writes in place into 'steps' \(.*test_writes\.py:\d+ .*steps \+= 1"):
        capture(WritesIntoABuffer(), hidden())


def test_a_refused_write_leaves_the_buffer_as_it_was() -> None:
    model = WritesIntoABuffer()
    with pytest.raises(CaptureError):
        capture(model, hidden())
    assert torch.equal(model.steps, torch.zeros(1))


class WritesIntoAnUnusedTensor(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scratch = self.blocks[0](hidden_states)
        kept = scratch.clone()
        scratch.fill_(float("nan"))
        return self.blocks[1](kept)


def test_a_write_that_nobody_reads_is_dropped() -> None:
    model = WritesIntoAnUnusedTensor(2)
    assert_splits_exactly(model)
    assert not any(node.target == "fill_" for node in capture(model, hidden()).nodes)
