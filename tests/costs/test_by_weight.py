import pytest
from torch import nn

from dit_pipelining.comm.layout import Layout
from dit_pipelining.costs.by_weight import owners_by_weight
from dit_pipelining.costs.machine import machine
from partitioners import Component, DoesNotFitError, RankSpec
from tests.capture.toy import Toy

ENCODER = Component("text_encoder", bytes=3000)
VAE = Component("vae", bytes=10, preferred_rank=-1)


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def test_where_there_is_room_components_go_where_they_prefer() -> None:
    assert owners_by_weight([Toy(4)], None, machine(2), [ENCODER, VAE]) == {"text_encoder": 0, "vae": 1}


def test_a_large_encoder_goes_to_the_rank_with_room_for_it() -> None:
    model = Toy(4)
    ranks = [RankSpec(memory_bytes=size_of(model)), RankSpec(memory_bytes=size_of(model) // 2 + 3000)]
    assert owners_by_weight([model], None, machine(2, ranks), [ENCODER, VAE])["text_encoder"] == 1


def test_the_stages_of_a_second_transformer_take_room_too() -> None:
    model = Toy(4)
    size = size_of(model)
    ranks = [RankSpec(memory_bytes=size + 3010)] * 2
    assert owners_by_weight([model, Toy(4)], None, machine(2, ranks), [ENCODER])
    with pytest.raises(DoesNotFitError, match="text_encoder on rank"):
        owners_by_weight([model, Toy(4), Toy(4), Toy(4)], None, machine(2, ranks), [ENCODER])


def test_weights_that_ranks_share_take_their_share_of_room() -> None:
    model = Toy(4)
    blocks = sum(own.nbytes for name, own in model.named_parameters() if name.startswith("blocks."))
    ranks = [RankSpec(memory_bytes=size_of(model) - blocks // 2)]
    with pytest.raises(DoesNotFitError):
        owners_by_weight([model], None, machine(1, ranks), [])
    assert owners_by_weight([model], None, machine(1, ranks), [], Layout(ulysses=2), 2) == {}
