"""Work counted on fake tensors, against sizes written by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dit_pipelining.capture.counting import Operation, Work, WorkCounter
from dit_pipelining.torch_internals import new_fake_mode

FLOAT = 4


def counted(function: object, *shapes: tuple[int, ...]) -> Work:
    with torch.no_grad(), new_fake_mode(), WorkCounter() as counter:
        inputs = [torch.empty(shape) for shape in shapes]
        counter.start()
        result = function(*inputs)  # type: ignore[operator]
        assert result is not None
        return counter.taken()


def test_a_matrix_product_reads_both_factors_and_writes_the_product() -> None:
    work = counted(lambda a, b: a @ b, (8, 16), (16, 4))
    assert work.operations == {Operation(2 * 8 * 16 * 4, FLOAT * (8 * 16 + 16 * 4 + 8 * 4), FLOAT): 1}
    assert work.peak_bytes == FLOAT * 8 * 4


def test_elementwise_operations_move_bytes_but_count_no_flops() -> None:
    work = counted(lambda a: a + 1, (8, 16))
    assert work.operations == {Operation(0, 2 * FLOAT * 8 * 16, FLOAT): 1}


def test_views_cost_nothing() -> None:
    work = counted(lambda a: a.reshape(4, 32).transpose(0, 1).unflatten(0, (2, 16))[0], (8, 16))
    assert work.operations == {}
    assert work.peak_bytes == 0


def test_an_expanded_tensor_is_read_once() -> None:
    work = counted(lambda a, b: a * b.expand(8, 16), (8, 16), (1, 16))
    assert work.operations == {Operation(0, FLOAT * (2 * 8 * 16 + 16), FLOAT): 1}


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    # The first sum is freed before the third is made: two of them at a time, never three.
    work = counted(lambda a: ((a + 1) + 1) + 1, (8, 16))
    assert work.peak_bytes == 2 * FLOAT * 8 * 16


def test_writing_in_place_takes_no_memory() -> None:
    assert counted(lambda a: a.add_(1), (8, 16)).peak_bytes == 0


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_one_operation_without_a_matrix_of_scores(masked: bool) -> None:
    shapes = (1, 2, 6, 16), (1, 2, 10, 16), (1, 2, 10, 16)
    with torch.no_grad(), new_fake_mode(), WorkCounter() as counter:
        inputs = [torch.empty(shape, device="meta") for shape in shapes]
        mask = torch.empty(6, 10, device="meta") if masked else None
        counter.start()
        result = counter.run_attention(F.scaled_dot_product_attention, inputs, dict(attn_mask=mask))
        work = counter.taken()
    elements = 2 * 16 * (2 * 6 + 2 * 10) + (6 * 10 if masked else 0)
    assert work.operations == {Operation(2 * 2 * 2 * 6 * 10 * 16, FLOAT * elements, FLOAT): 1}
    assert work.peak_bytes == result.numel() * FLOAT


def test_a_table_is_read_where_it_is_looked_up() -> None:
    table = nn.Embedding(1000, 8, device="meta")
    with torch.no_grad(), new_fake_mode(), WorkCounter() as counter:
        weight, index = torch.empty(table.weight.shape), torch.zeros(3, dtype=torch.int64)
        counter.start()
        F.embedding(index, weight)
        assert counter.taken().operations == {Operation(0, 2 * 3 * 8 * FLOAT, FLOAT): 1}


def test_portions_do_not_overlap() -> None:
    with torch.no_grad(), new_fake_mode(), WorkCounter() as counter:
        a = torch.empty(4, 4)
        kept = a + 1
        counter.start()
        assert counter.taken() == Work({}, 0)
        product = a @ a
        assert counter.taken().flops == 2 * 4 * 4 * 4
        assert kept.shape == product.shape
