"""Which ranks compute a component together."""

from dit_pipelining.comm.layout import Layout
from dit_pipelining.sharding.teams import team_of


def test_helpers_are_the_ranks_beside_the_owner() -> None:
    team = team_of(Layout(pipeline=4), rank=0, owner=3, size=3, towards=-1)
    assert team.compute == (3, 2, 1)
    assert team.owners == (3,)
    assert team_of(Layout(pipeline=4), rank=2, owner=1, size=4, towards=-1).compute == (1, 0, 3, 2)
    assert team_of(Layout(pipeline=4), rank=2, owner=3, size=3, towards=1).compute == (3, 0, 1)


def test_owners_of_all_lines_compute_first_and_copies_stay_apart() -> None:
    layout = Layout(data=2, pipeline=2, ulysses=2)  # lines 0, 2 and 1, 3; the second copy from 4 on
    team = team_of(layout, rank=0, owner=1, size=3, towards=-1)
    assert team.owners == (2, 3)
    assert team.compute == (2, 3, 1)
    assert team_of(layout, rank=7, owner=1, size=2, towards=-1).compute == (6, 7)
    eight = team_of(Layout(ring=2, ulysses=4), rank=5, owner=0, size=8, towards=1)
    assert eight.compute == eight.owners == tuple(range(8))


def test_all_ranks_of_a_copy_agree() -> None:
    layout = Layout(cfg=2, pipeline=2, tensor=2)
    assert len({team_of(layout, rank, owner=3, size=5, towards=-1) for rank in range(8)}) == 1
