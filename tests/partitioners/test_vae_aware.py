"""Cut and placement chosen together, against every cut with every placement."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioners import (
    BlockCost,
    Component,
    DoesNotFitError,
    InvalidCostError,
    ModelCosts,
    PartitionError,
    RankSpec,
    TooManyStagesError,
    balanced,
    compute_balanced_block_split,
    place,
    uniform,
    vae_aware,
    with_components,
)
from tests.partitioners import brute_force, strategies


def components(max_components: int = 2) -> st.SearchStrategy[tuple[Component, ...]]:
    one = st.builds(
        Component,
        name=st.just(""),
        seconds=st.integers(0, 12).map(float),
        bytes=st.integers(0, 20),
        rank=st.sampled_from([None, None, 0, -1]),
        preferred_rank=st.sampled_from([0, -1]),
        alone=st.booleans().map(lambda drawn: drawn),
    )
    return st.lists(one, max_size=max_components).map(
        lambda found: tuple(
            Component(f"component {i}", c.seconds, c.bytes, c.rank, c.preferred_rank, c.alone and i == 0)
            for i, c in enumerate(found)
        )
    )


@st.composite
def problems(draw: st.DrawFn, memory_bytes: st.SearchStrategy[int | None]) -> tuple[ModelCosts, list[RankSpec]]:
    costs, ranks = draw(strategies.problems(memory_bytes, max_stages=3))
    placed = draw(components())
    return ModelCosts(costs.blocks, costs.prologue, costs.epilogue, costs.replicated_bytes, placed), ranks


def every_placement(costs: ModelCosts, num_ranks: int) -> Iterator[dict[str, int]]:
    choices = [range(num_ranks) if c.rank is None else [c.rank % num_ranks] for c in costs.components]
    for chosen in product(*choices):
        yield dict(zip((c.name for c in costs.components), chosen, strict=True))


def judged(costs: ModelCosts, ranks: Sequence[RankSpec]) -> Iterator[tuple[int, float]]:
    """Largest shortfall and bottleneck of every cut with every placement in which components that must be are alone."""
    for owners in every_placement(costs, len(ranks)):
        loaded = with_components(ranks, costs.components, owners)
        lonely = {owners[c.name] for c in costs.components if c.alone}
        for counts in brute_force.all_counts(costs.num_blocks, len(ranks)):
            if not any(counts[rank] for rank in lonely):
                yield max(brute_force.lacking(costs, loaded, counts)), brute_force.busiest(costs, loaded, counts)


@settings(deadline=None, max_examples=300)
@given(problems(memory_bytes=st.one_of(st.none(), st.integers(0, 60))))
def test_equals_brute_force_over_cuts_and_placements(problem: tuple[ModelCosts, list[RankSpec]]) -> None:
    costs, ranks = problem
    every = list(judged(costs, ranks))
    fitting = [busiest for lacking, busiest in every if lacking == 0]
    if fitting:
        placement = place(costs, ranks)
        counts = placement.partition.counts
        assert brute_force.busiest(costs, placement.ranks, counts) == min(fitting)
        assert not any(brute_force.lacking(costs, placement.ranks, counts))
        assert list(placement.ranks) == with_components(ranks, costs.components, placement.owners)
        assert not any(counts[placement.owners[c.name]] for c in costs.components if c.alone)
        assert vae_aware(costs, ranks) == placement.partition
    elif every:
        with pytest.raises(DoesNotFitError) as caught:
            place(costs, ranks)
        assert max(caught.value.shortfalls) == min(lacking for lacking, _ in every)
        loaded = with_components(ranks, costs.components, caught.value.owners)
        assert list(caught.value.shortfalls) == brute_force.lacking(costs, loaded, caught.value.counts)
    else:
        with pytest.raises(PartitionError, match="no rank is left to hold blocks"):
            place(costs, ranks)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), num_blocks=st.integers(8, 64), num_stages=st.integers(1, 8))
def test_is_never_slower_than_uniform_with_components_where_they_prefer(
    data: st.DataObject, num_blocks: int, num_stages: int
) -> None:
    seconds = data.draw(st.lists(st.floats(1e-3, 1.0), min_size=num_blocks, max_size=num_blocks))
    speeds = data.draw(st.lists(st.floats(0.2, 4.0), min_size=num_stages, max_size=num_stages))
    encode, decode = data.draw(st.tuples(st.floats(0, 10.0), st.floats(0, 10.0)))
    text, vae = Component("text_encoder", encode), Component("vae", decode, preferred_rank=-1)
    costs = ModelCosts(tuple(map(BlockCost, seconds)), components=(text, vae))
    ranks = [RankSpec(speed=speed) for speed in speeds]
    placement = place(costs, ranks)
    plain = with_components(ranks, costs.components, dict(text_encoder=0, vae=num_stages - 1))
    best = placement.partition.bottleneck(costs, placement.ranks)
    assert best <= uniform(costs, ranks).bottleneck(costs, plain) * (1 + 1e-9)
    assert best <= balanced(costs, ranks).bottleneck(costs, plain) * (1 + 1e-9)


def test_components_stay_where_they_prefer_if_that_is_as_good() -> None:
    placed = (Component("text_encoder", bytes=5), Component("vae", 1.0, preferred_rank=-1))
    placement = place(ModelCosts(ModelCosts.uniform(8).blocks, components=placed), [RankSpec()] * 3)
    assert placement.owners == {"text_encoder": 0, "vae": 2}
    assert placement.partition.counts == (3, 3, 2)


def test_a_text_encoder_goes_to_the_rank_that_has_room_for_it() -> None:
    # 4 blocks of 2 bytes; the encoder fits beside none of them on the first rank.
    costs = ModelCosts(
        ModelCosts.uniform(4, parameter_bytes=2).blocks, components=(Component("text_encoder", bytes=6),)
    )
    placement = place(costs, [RankSpec(memory_bytes=5), RankSpec(memory_bytes=10)])
    assert placement.owners == {"text_encoder": 1}
    assert placement.partition.counts == (2, 2)


def test_a_slow_decode_leaves_its_rank_without_blocks() -> None:
    costs = ModelCosts(ModelCosts.uniform(8).blocks, components=(Component("vae", 4.0, preferred_rank=-1),))
    assert place(costs, [RankSpec()] * 3).partition.counts == (4, 4, 0)


def test_a_component_that_shall_be_alone_gets_a_rank_of_its_own() -> None:
    costs = ModelCosts(ModelCosts.uniform(8).blocks, components=(Component("vae", 0.1, preferred_rank=-1, alone=True),))
    placement = place(costs, [RankSpec()] * 3)
    assert (placement.partition.counts, placement.owners) == ((4, 4, 0), {"vae": 2})


def test_does_not_fit_says_where_components_were_and_how_many_ranks_would_do() -> None:
    costs = ModelCosts(
        ModelCosts.uniform(8, parameter_bytes=2**30).blocks,
        components=(Component("text_encoder", bytes=5 * 2**30, rank=0),),
    )
    with pytest.raises(DoesNotFitError) as caught:
        place(costs, [RankSpec(memory_bytes=6 * 2**30)] * 2)
    # 13 GiB do not go into 2 x 6; a third rank has room.
    assert caught.value.smallest_num_ranks == 3
    assert "text_encoder on rank 0" in str(caught.value)
    assert "use at least 3 ranks, those that are added like the largest" in str(caught.value)


def test_a_component_bound_to_a_rank_that_is_not_there_is_refused() -> None:
    costs = ModelCosts(ModelCosts.uniform(8).blocks, components=(Component("vae", rank=2),))
    with pytest.raises(InvalidCostError, match=r"Component\('vae'\).rank is 2; give a rank, which are 0 to 1"):
        place(costs, [RankSpec()] * 2)


def test_two_components_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidCostError, match="each component a name of its own"):
        ModelCosts(ModelCosts.uniform(8).blocks, components=(Component("vae"), Component("vae")))


# ---- compute_balanced_block_split ----------------------------------------------------------------------------------


def test_the_outer_stages_get_fewer_blocks() -> None:
    # 30 blocks and twice 15%: 39 blocks' worth of work, 13 a stage of three.
    assert compute_balanced_block_split(30, 3) == [(0, 9), (9, 21), (21, 30)]
    assert compute_balanced_block_split(30, 3, vae_encode_overhead=0.0) == [(0, 11), (11, 23), (23, 30)]


def test_without_overhead_it_is_the_uniform_split() -> None:
    assert compute_balanced_block_split(30, 4, 0, 0) == uniform(ModelCosts.uniform(30), [RankSpec()] * 4).ranges


def test_one_stage_does_everything() -> None:
    assert compute_balanced_block_split(30, 1) == [(0, 30)]


def test_an_overhead_above_a_stages_share_leaves_it_empty() -> None:
    assert compute_balanced_block_split(30, 3, vae_encode_overhead=0.0, vae_decode_overhead=2.0) == [
        (0, 15),
        (15, 30),
        (30, 30),
    ]
    assert compute_balanced_block_split(8, 2, vae_encode_overhead=1.5, vae_decode_overhead=0.0) == [(0, 0), (0, 8)]


def test_more_stages_than_blocks_are_an_error() -> None:
    with pytest.raises(TooManyStagesError):
        compute_balanced_block_split(3, 4)


@pytest.mark.parametrize("arguments", [(0, 1), (8, 0), (8.0, 2), (8, True), (8, 2, -0.1), (8, 2, 0.1, float("nan"))])
def test_numbers_that_make_no_sense_are_errors(arguments: tuple[float, ...]) -> None:
    with pytest.raises(PartitionError):
        compute_balanced_block_split(*arguments)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(num_blocks=st.integers(1, 12), num_stages=st.integers(1, 4), encode=st.floats(0, 1.5), decode=st.floats(0, 1.5))
def test_no_other_split_has_a_less_busy_stage(num_blocks: int, num_stages: int, encode: float, decode: float) -> None:
    if num_stages > num_blocks:
        return

    def busiest(counts: Sequence[int]) -> float:
        seconds = [count / num_blocks for count in counts]
        seconds[0] += encode
        seconds[-1] += decode
        return max(seconds)

    split = compute_balanced_block_split(num_blocks, num_stages, encode, decode)
    assert [start for start, _ in split] == [0, *(end for _, end in split[:-1])]
    assert split[-1][1] == num_blocks
    best = min(map(busiest, brute_force.all_counts(num_blocks, num_stages)))
    assert busiest([end - start for start, end in split]) == pytest.approx(best)
