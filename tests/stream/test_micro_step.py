"""What a header is given, the next stage reads."""

import pytest

from dit_pipelining.stream.micro_step import ChunkFacts, Header, Kind, MicroStep, decode, encode, header_length, noted
from dit_pipelining.stream.schedule import Row, Start, rows, steady_starts
from dit_pipelining.stream.spec import StreamSpec

SPEC = StreamSpec(levels=(1.0, 0.7, 0.4), streams=2, guidance_scale=2.0)


def test_rows_and_what_is_known_of_their_chunks_arrive() -> None:
    step = MicroStep(
        2**40,
        (Row(0, 0, 2, 1999), Row(0, 1, 0, 2**33), Row(1, 0, 2, 1999)),
        (ChunkFacts(1 / 3, False, False, 1.7e9 + 1 / 7), ChunkFacts(0.9, True, True), ChunkFacts(1 / 3, False)),
    )
    numbers = encode(Header(Kind.ROWS, step), header_length(SPEC, 4))
    noted(numbers, 4)[3, 1] = 0.25
    assert decode(numbers) == Header(Kind.ROWS, step)
    assert noted(numbers, 4)[3].tolist() == [0.0, 0.25]


@pytest.mark.parametrize(
    "header",
    [Header(Kind.PROMPT, numbers=(1.0, 7.0)), Header(Kind.REBALANCE, numbers=(0.1, 0.2, 1 / 3)), Header(Kind.END)],
)
def test_other_messages_arrive(header: Header) -> None:
    assert decode(encode(header, header_length(SPEC, 3))) == header


def test_the_most_rows_fit() -> None:
    step = MicroStep(0, (Row(1, 1, 2, 0),) * SPEC.max_rows, (ChunkFacts(0.5, True),) * SPEC.max_rows)
    assert decode(encode(Header(Kind.ROWS, step), header_length(SPEC, 4))).micro_step == step


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_row_i_of_tick_m_holds_chunk_m_minus_i_times_the_stages(num_stages: int) -> None:
    spec, chunks = StreamSpec(levels=(1.0, 0.7, 0.4)), 5
    starts = list(steady_starts(num_stages, spec, chunks))
    for tick in range(chunks + 3 * num_stages):
        expected = [Row(0, 0, i, tick - i * num_stages) for i in range(3) if 0 <= tick - i * num_stages < chunks]
        assert rows(tick, num_stages, spec, starts) == expected


def test_a_chunk_waits_for_the_one_it_sees() -> None:
    clean = StreamSpec(levels=(1.0, 0.5), policy="clean")
    assert [start.tick for start in steady_starts(3, clean, 3)] == [
        0,
        7,
        14,
    ]  # two levels and the pass over the clean chunk
    assert rows(6, 3, clean, [Start(0, 0, 0)]) == [Row(0, 0, 2, 0)]
    last = StreamSpec(levels=(1.0, 0.5), policy="last")
    assert [start.tick for start in steady_starts(3, last, 3)] == [0, 4, 8]
