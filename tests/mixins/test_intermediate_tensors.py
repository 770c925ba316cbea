"""What stages hand on."""

import pytest
import torch

from dit_pipelining.mixins import AsyncIntermediateTensors, IntermediateTensors


def test_names_slices_and_equality() -> None:
    tensors = IntermediateTensors({"hidden_states": torch.arange(6.0).view(3, 2), "residual": torch.zeros(3)})
    assert "residual" in tensors
    assert len(tensors) == 2
    assert list(tensors.keys()) == ["hidden_states", "residual"]
    assert tensors[1:] == IntermediateTensors(
        {"hidden_states": torch.tensor([[2.0, 3], [4, 5]]), "residual": torch.zeros(2)}
    )
    assert tensors != IntermediateTensors({"hidden_states": tensors["hidden_states"]})
    tensors["residual"] = torch.ones(3)
    assert dict(tensors.items())["residual"].sum() == 3
    assert repr(tensors) == "IntermediateTensors({'hidden_states': (3, 2), 'residual': (3,)})"


def test_received_ones_wait_at_the_first_look() -> None:
    events = []

    class Transfer:
        def wait(self) -> None:
            events.append("wait")
            received["hidden_states"] = torch.ones(2)

    received: dict[str, torch.Tensor] = {}
    tensors = AsyncIntermediateTensors(received, [Transfer()], [lambda: events.append("after")])
    assert isinstance(tensors, IntermediateTensors)
    assert events == []
    assert tensors["hidden_states"].sum() == 2
    assert tensors[:1]["hidden_states"].shape == (1,)
    assert events == ["wait", "after"]


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="hidden"):
        IntermediateTensors({})["hidden"]
