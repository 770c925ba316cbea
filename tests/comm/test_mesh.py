import itertools

from hypothesis import given
from hypothesis import strategies as st

from dit_pipelining.comm.layout import Layout
from dit_pipelining.comm.mesh import Mesh, layout_of
from dit_pipelining.config import ParallelConfig

SIZES = st.integers(1, 3)
LAYOUTS = st.builds(Layout, SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)


def test_the_dimension_that_talks_most_has_neighbouring_ranks() -> None:
    layout = Layout(data=2, cfg=2, pipeline=2, ulysses=2, tensor=2)
    assert layout.peers(5, "tensor") == (4, 5)
    assert layout.peers(5, "ulysses") == (5, 7)
    assert layout.peers(5, "pipeline") == (1, 5)
    assert layout.peers(5, "cfg") == (5, 13)
    assert layout.peers(5, "data") == (5, 21)
    assert layout.coordinates(5) == dict(data=0, cfg=0, pipeline=1, ring=0, ulysses=0, tensor=1)


def test_a_line_holds_the_stages_of_all_replicas() -> None:
    mesh = Mesh.of(Layout(cfg=2, pipeline=2, ulysses=2), 5)
    assert (mesh.line, mesh.rank, mesh.stage, mesh.replica, mesh.world_rank) == ((1, 3, 5, 7), 2, 0, 1, 5)
    assert (mesh.ranks_of(1), mesh.world_ranks_of(1)) == ([2, 3], [5, 7])


def test_a_line_is_the_whole_launch_unless_it_says_otherwise() -> None:
    assert Mesh(3, 2, 2).line == (0, 1, 2, 3)
    assert Mesh(3, 2, 2).copies == (3,)


@given(LAYOUTS)
def test_every_rank_is_in_one_line_and_lines_share_no_rank(layout: Layout) -> None:
    lines = {Mesh.of(layout, rank).line for rank in range(layout.size)}
    assert sorted(lines) == layout.groups("cfg", "pipeline") == Mesh.of(layout, 0).in_all_lines(range(len(min(lines))))
    assert sorted(itertools.chain(*lines)) == list(range(layout.size))
    assert {len(line) for line in lines} == {layout.cfg * layout.pipeline}


def test_a_configuration_gives_the_layout() -> None:
    config = ParallelConfig(pipeline_parallel_size=2, data_parallel_size=3, ulysses_degree=2)
    assert layout_of(config) == Layout(data=3, pipeline=2, ulysses=2)
    assert (config.world_size, config.line_size) == (12, 2)
