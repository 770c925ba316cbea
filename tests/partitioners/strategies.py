"""Hypothesis strategies for small models and ranks."""

from hypothesis import strategies as st

from partitioners import BlockCost, ModelCosts, RankSpec

# Small integers, and speeds and bandwidths that are powers of two: every sum and quotient is exact, so that equal
# bottlenecks are equal floats and ties can be compared without a tolerance.
SECONDS = st.integers(0, 6).map(float)
POWERS_OF_TWO = st.sampled_from([0.5, 1.0, 2.0, 4.0])
BYTES = st.integers(0, 8)


def block_costs() -> st.SearchStrategy[BlockCost]:
    return st.builds(BlockCost, SECONDS, BYTES, BYTES, BYTES)


def model_costs(min_blocks: int = 1, max_blocks: int = 6) -> st.SearchStrategy[ModelCosts]:
    blocks = st.lists(block_costs(), min_size=min_blocks, max_size=max_blocks).map(tuple)
    return st.builds(ModelCosts, blocks, block_costs(), block_costs(), st.integers(0, 4))


def rank_specs(memory_bytes: st.SearchStrategy[int | None]) -> st.SearchStrategy[RankSpec]:
    return st.builds(
        RankSpec,
        speed=POWERS_OF_TWO,
        memory_bytes=memory_bytes,
        fixed_seconds=st.one_of(st.just(0.0), st.integers(0, 20).map(float)),
        fixed_bytes=st.integers(0, 4),
        link_bytes_per_second=st.one_of(st.none(), POWERS_OF_TWO),
        link_latency_seconds=st.integers(0, 3).map(float),
    )


@st.composite
def problems(
    draw: st.DrawFn, memory_bytes: st.SearchStrategy[int | None], max_stages: int = 4
) -> tuple[ModelCosts, list[RankSpec]]:
    """A model and ranks for it, at most as many as blocks."""
    costs = draw(model_costs())
    num_stages = draw(st.integers(1, min(max_stages, costs.num_blocks)))
    return costs, draw(st.lists(rank_specs(memory_bytes), min_size=num_stages, max_size=num_stages))
