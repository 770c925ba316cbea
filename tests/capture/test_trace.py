"""What a forward may do around its blocks, on small hand-written models."""

import functools
import gc
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from dit_pipelining.api import split_model
from dit_pipelining.capture.capturing import capture
from dit_pipelining.errors import BlocksNotFoundError, CaptureError
from dit_pipelining.torch_internals import is_fake
from tests.capture import tables
from tests.capture.toy import DIM, Block, Toy, assert_splits_exactly, hidden, randn
from tests.same import assert_same


class Plain(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.proj_out(self.run_blocks(self.proj_in(hidden_states)))


# ---- operations -----------------------------------------------------------------------------------------------------


class OpsThatReturnTheirInput(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.to(torch.float32).contiguous()
        for block in self.blocks:
            x = block(x).float().to(x.device).type_as(x).expand(-1, -1, -1).contiguous()
        return x


def test_operations_that_return_their_input_leave_no_node() -> None:
    model = OpsThatReturnTheirInput(2)
    assert_splits_exactly(model)
    targets = {str(node.target) for node in capture(model, hidden()).nodes}
    assert not targets & {"to", "contiguous", "float", "type_as"}


class NoOpAroundAStepInvariantValue(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](hidden_states, text)
        return self.blocks[1](x, text.to(x))


def test_a_no_op_does_not_make_a_value_depend_on_a_block() -> None:
    inputs = hidden() | dict(text=randn(1, 4, DIM, seed=1))
    split = split_model(NoOpAroundAStepInvariantValue(2), 2, inputs, partitioner="uniform")
    assert [len(boundary) for boundary in split.boundaries] == [1]


class ManyOps(Toy):
    """Operators, reflected operators, indexing, iteration, torch functions and properties."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = 1 - 2 ** (hidden_states / 4)
        x = self.blocks[0](x)
        first, *rest = x  # iterates over the batch
        x = torch.stack([first, *rest]) @ x.mT.mT.transpose(-1, -2) @ x
        x = x[..., None, :].squeeze(-2)[:, torch.arange(4), ...]
        x = x.unflatten(-1, (2, -1)).flatten(-2)
        x = torch.where(x > 0, x, -x).real
        parts = x.chunk(2, dim=-1)
        x = torch.cat([parts[1], parts[0]], dim=-1)
        x = torch.einsum("bnd,bnd->bnd", x, x).sigmoid()
        return self.blocks[1](x).T.T * x.shape[-1] + x.max(dim=1).values[:, None]


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_operators_indexing_and_iteration_are_recorded_as_they_are() -> None:
    assert_splits_exactly(ManyOps(2))


class AutocastInGlue(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](hidden_states)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.matmul(x, x.transpose(-1, -2))
            with torch.autocast("cpu", enabled=False):
                y = torch.matmul(x.float(), x.float())
            x = self.text(hidden_states) * y.mean() + x.mean()
        x = self.blocks[1](x.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.blocks[2](x)


def test_autocast_regions_in_glue_and_around_blocks_are_kept() -> None:
    assert_splits_exactly(AutocastInGlue(3))


def test_a_call_under_autocast_is_captured_anew() -> None:
    model = Plain(2)
    with torch.no_grad():
        split = split_model(model, 2, hidden(), partitioner="uniform")
        plain = model(**hidden())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same(split(**hidden()), model(**hidden()))
        assert_same(split(**hidden()), plain)


class DrawsNoise(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states + torch.rand(DIM))


class FillsWithNoise(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(torch.empty_like(hidden_states).normal_() + hidden_states)


class DropsOut(Toy):
    def __init__(self, probability: float) -> None:
        super().__init__(2)
        self.dropout = nn.Dropout(probability)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.run_blocks(hidden_states))


@pytest.mark.parametrize(("cls", "line"), [(DrawsNoise, r"torch\.rand"), (FillsWithNoise, r"normal_\(\)")])
def test_random_numbers_in_glue_are_refused_with_the_models_line(cls: type[Toy], line: str) -> None:
    with pytest.raises(CaptureError, match=rf"draws random numbers at .*test_trace\.py:\d+ \(.*{line}"):
        capture(cls(2), hidden())


def test_dropout_in_glue_is_refused_in_training_only() -> None:
    model = DropsOut(0.5)
    with pytest.raises(CaptureError, match=r"call model\.eval\(\)"):
        capture(model, hidden())
    assert_splits_exactly(model.eval())


def test_dropout_of_nothing_is_no_random_number() -> None:
    assert_splits_exactly(DropsOut(0.0))


def test_training_mode_is_captured_apart_from_evaluation() -> None:
    model = DropsOut(0.5).eval()
    split = split_model(model, 2, hidden(), partitioner="uniform")
    model.train()
    with pytest.raises(CaptureError, match=r"call model\.eval\(\)"):
        split(**hidden())


# ---- what blocks and models take and return -------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    context: torch.Tensor | None


class ReturnsDict(Block):
    def forward(self, x: torch.Tensor, context: Any = None) -> Any:
        return {"sample": super().forward(x), "context": None, "extra": [x * 2]}


class ReturnsNothingBeside(Block):
    def forward(self, x: torch.Tensor, context: Any = None) -> Any:
        return super().forward(x), None


class ReturnsItsContextFirst(Block):
    def forward(self, x: torch.Tensor, context: Any = None) -> Any:
        return context, super().forward(x, context)


class ReturnsNamedTuple(Block):
    def forward(self, x: torch.Tensor, context: Any = None) -> Any:
        return Pair(super().forward(x), context)


class TakesNestedArguments(Block):
    def forward(self, x: Any, context: Any = None, scale: Any = 1) -> torch.Tensor:
        (first, options) = x
        return super().forward(first, options["context"]) * scale[0]


class UsesDicts(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](hidden_states)
        assert first["context"] is None
        second = self.blocks[1](first["sample"])
        return second["sample"] + first["extra"][0]


class UsesNothingBeside(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states, nothing = block(hidden_states)
            assert nothing is None
        return hidden_states


class FollowsIdentity(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> Any:
        for block in self.blocks:
            returned, hidden_states = block(hidden_states, text)
            assert returned is text
        return hidden_states + returned


class UsesNamedTuples(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> Any:
        pair = Pair(hidden_states, text)
        for block in self.blocks:
            pair = block(pair.x, pair.context)
        return pair


class PassesNestedArguments(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block((hidden_states, {"context": self.text(text), "mode": "x"}), scale=[2.0])
        return hidden_states


def with_text() -> dict[str, Any]:
    return hidden() | dict(text=TEXT)


TEXT = randn(1, 4, DIM, seed=1)


def test_blocks_may_return_a_dictionary() -> None:
    assert_splits_exactly(UsesDicts(2, ReturnsDict))


def test_blocks_may_return_none_beside_a_tensor() -> None:
    assert_splits_exactly(UsesNothingBeside(3, ReturnsNothingBeside))


def test_a_block_that_returns_its_input_sends_nothing_for_it() -> None:
    split = assert_splits_exactly(FollowsIdentity(3, ReturnsItsContextFirst), with_text)
    assert [len(boundary) for boundary in split.boundaries] == [1, 1]


def test_named_tuples_keep_their_type() -> None:
    split = assert_splits_exactly(UsesNamedTuples(2, ReturnsNamedTuple), with_text)
    assert type(split(**with_text())) is Pair


def test_blocks_may_take_nested_arguments() -> None:
    assert_splits_exactly(PassesNestedArguments(3, TakesNestedArguments), with_text)


class ReturnsStructure(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, names: Any = None) -> Any:
        x = self.run_blocks(hidden_states)
        return {"x": [x, (x, None)], "text": text, "projected": self.text(text), "number": 3, "names": names}


def test_the_output_structure_is_the_models_own() -> None:
    split = assert_splits_exactly(ReturnsStructure(2), lambda: with_text() | dict(names=["a"]))
    inputs = with_text()
    output = split(**inputs)
    assert output["x"][0] is output["x"][1][0]
    assert output["text"] is inputs["text"]


class CallsTwice(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(self.run_blocks(hidden_states))


def test_a_block_that_is_called_twice_is_held_by_every_stage_that_calls_it() -> None:
    split = assert_splits_exactly(CallsTwice(2), num_blocks=4)
    assert [sorted({name.rpartition(".linear")[0] for name in stage.state_dict()}) for stage in split.stages] == [
        ["blocks.0"],
        ["blocks.1"],
        ["blocks.0"],
        ["blocks.1"],
    ]


def test_blocks_that_are_never_called_are_an_error_that_says_to_name_others() -> None:
    class Idle(Toy):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.proj_in(hidden_states)

    with pytest.raises(BlocksNotFoundError, match=r"Idle calls none of its blocks \(blocks\.0, .*blocks=\[\.\.\.\]"):
        capture(Idle(2), hidden())


# ---- the model's own tensors and attributes ---------------------------------------------------------------------------


class BuffersAndAttributes(Toy):
    table: torch.Tensor
    unsaved: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3)
        self.scale = nn.Parameter(randn(DIM, seed=2))
        self.register_buffer("table", randn(4, DIM, seed=3))
        self.register_buffer("unsaved", randn(4, DIM, seed=4), persistent=False)
        self.plain = randn(4, DIM, seed=5)
        self.in_list = [randn(4, DIM, seed=6)]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](hidden_states * self.scale, self.table)
        x = self.blocks[1](x, self.unsaved + self.plain)
        return self.blocks[2](x, self.in_list[0] + self.table) * self.scale


def test_parameters_buffers_and_plain_tensors_are_used_where_they_are_needed() -> None:
    split = assert_splits_exactly(BuffersAndAttributes())
    names = [set(stage.state_dict()) for stage in split.stages]
    assert [{"scale", "table"} & stage for stage in names] == [{"scale", "table"}, set(), {"scale", "table"}]
    assert not any("unsaved" in stage for stage in names)


def test_a_changed_parameter_is_seen_by_the_stages() -> None:
    model = BuffersAndAttributes()
    with torch.no_grad():
        split = split_model(model, 2, hidden(), partitioner="uniform")
        before = split(**hidden())
        model.scale.mul_(2)
        assert_same(split(**hidden()), model(**hidden()))
        assert not torch.equal(split(**hidden()), before)


class CachesOnItself(Toy):
    """A forward that keeps tables on the model, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__(2)
        self.tables: dict[int, torch.Tensor] = {}
        self.history: list[torch.Tensor] = []
        self.calls = 0
        self.last: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        length = hidden_states.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length)[:, None] * torch.ones(DIM)
        self.calls += 1
        self.last = hidden_states * 2
        self.history.append(self.last)
        self.new_attribute = self.last
        return self.run_blocks(hidden_states, self.tables[length])


def test_attributes_that_the_forward_writes_are_restored_after_a_capture() -> None:
    model = CachesOnItself()
    capture(model, hidden())
    assert model.tables == {}
    assert model.history == []
    assert model.calls == 0
    assert model.last is None
    assert not hasattr(model, "new_attribute")


def test_a_cache_that_was_filled_before_the_capture_is_kept() -> None:
    model = CachesOnItself()
    model(**hidden())
    tables, history = dict(model.tables), list(model.history)
    assert_splits_exactly(model)
    assert model.tables[4] is tables[4]
    assert model.history[0] is history[0]


class ReadsFlags(Toy):
    def __init__(self) -> None:
        super().__init__(2)
        self.scale = 1.0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states * self.scale)


def test_a_value_that_is_set_on_the_model_between_two_calls_is_noticed() -> None:
    model = ReadsFlags()
    split = split_model(model, 2, hidden())
    assert_same(split(**hidden()), model(**hidden()))
    model.scale = 3.0
    assert_same(split(**hidden()), model(**hidden()))


class Table:
    """A plain object that makes its rows when it is first asked, and keeps them in a list of lists."""

    def __init__(self) -> None:
        self.rows: list[list[torch.Tensor]] | None = None

    def get(self, length: int) -> torch.Tensor:
        if self.rows is None:
            self.rows = [[torch.arange(16.0)[:, None] * torch.ones(DIM)]]
        return self.rows[0][0][:length]


class CachesInAHelper(Toy):
    def __init__(self) -> None:
        super().__init__(2)
        self.helper = {"table": Table()}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states, self.helper["table"].get(hidden_states.shape[1]))


def test_tables_of_plain_objects_are_restored_after_a_capture() -> None:
    model = CachesInAHelper()
    capture(model, hidden())
    assert model.helper["table"].rows is None
    split = split_model(model, 2, hidden())
    longer = dict(hidden_states=randn(2, 6, DIM))
    assert_same(split(**longer), model(**longer))


class CachesInAnotherFile(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states, tables.table(hidden_states))


def test_global_tables_of_other_files_hold_no_tensors_without_data_after_a_capture() -> None:
    tables.TABLES[3] = kept = (torch.ones(3), torch.zeros(3))
    assert_splits_exactly(CachesInAnotherFile(2))
    split = split_model(CachesInAnotherFile(2), 2, hidden())
    held = [tensor for pair in tables.TABLES.values() for tensor in pair] + tables.ROWS
    assert not any(map(is_fake, held))
    assert tables.TABLES[3] is kept
    assert_same(split(**hidden()), CachesInAnotherFile(2)(**hidden()))


@functools.lru_cache(maxsize=8)
def positions(length: int, dim: int = DIM) -> torch.Tensor:
    return torch.arange(length)[:, None] / torch.arange(1, dim + 1)


class Helper(nn.Module):
    @functools.lru_cache(maxsize=8)  # noqa: B019
    def table(self, length: int) -> torch.Tensor:
        return positions(length) * 2

    @staticmethod
    @functools.cache
    def offset(length: int) -> torch.Tensor:
        return torch.full((length, 1), 0.5)


class UsesCachedFunctions(Toy):
    def __init__(self) -> None:
        super().__init__(2)
        self.helper = Helper()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        length = hidden_states.shape[1]
        x = self.blocks[0](hidden_states, positions(length))
        return self.blocks[1](x, self.helper.table(length) + Helper.offset(length))


def test_function_caches_hold_no_tensor_without_data_after_a_capture() -> None:
    model = UsesCachedFunctions()
    capture(model, hidden())
    assert not any(is_fake(tensor) for tensor in (positions(4), model.helper.table(4), Helper.offset(4)))
    assert_splits_exactly(model)


def test_function_caches_that_were_filled_before_do_not_change_the_capture() -> None:
    model = UsesCachedFunctions()
    expected = capture(model, hidden()).nodes
    model(**hidden())
    assert [str(node) for node in capture(model, hidden()).nodes] == [str(node) for node in expected]


def fake_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor) and is_fake(found)]


def test_no_tensor_without_data_outlives_a_capture() -> None:
    before = fake_tensors()  # compiled blocks of other tests keep theirs
    known = {id(tensor) for tensor in before}
    models: list[nn.Module] = [UsesCachedFunctions(), CachesOnItself(), BuffersAndAttributes()]
    graphs = [capture(model, hidden()) for model in models]
    assert graphs
    assert not [tensor for tensor in fake_tensors() if id(tensor) not in known]


def test_the_parameters_are_the_models_own_after_a_failed_capture() -> None:
    class Fails(Toy):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            self.left_behind = self.blocks[0](hidden_states)
            raise RuntimeError("stop")

    model = Fails(2)
    parameters = dict(model.named_parameters())
    call = nn.Module.__call__
    with pytest.raises(RuntimeError, match="stop"):
        capture(model, hidden())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert nn.Module.__call__ is call
    assert not hasattr(model, "left_behind")


def test_another_threads_models_run_as_ever_during_a_capture() -> None:
    other = Plain(2)
    expected = other(**hidden())
    results: list[torch.Tensor] = []

    class Waits(Toy):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: results.append(other(**hidden())))
            thread.start()
            thread.join()
            return self.run_blocks(hidden_states)

    capture(Waits(2), hidden())
    assert torch.equal(results[0], expected)


# ---- callers ----------------------------------------------------------------------------------------------------------


def test_a_caller_in_inference_mode_gets_what_the_model_returns() -> None:
    model = ReturnsStructure(3)
    with torch.inference_mode():
        inputs = with_text()
        expected = model(**inputs)
        split = split_model(model, 3, inputs, partitioner="uniform")
        assert_same(split(**inputs), expected)
        assert split(**inputs)["x"][0].is_inference()


def test_a_split_made_in_inference_mode_serves_callers_outside_it() -> None:
    model = BuffersAndAttributes()
    with torch.inference_mode():
        split = split_model(model, 3, hidden(), partitioner="uniform")
        split(**hidden())
    inputs = hidden() | dict(hidden_states=randn(2, 4, DIM).requires_grad_())
    split(**inputs).sum().backward()
    assert inputs["hidden_states"].grad is not None


def test_gradients_of_inputs_and_weights_equal_the_models() -> None:
    model = ReturnsStructure(3)

    def gradients(function: Any) -> list[torch.Tensor]:
        x, text = randn(2, 4, DIM).requires_grad_(), randn(1, 4, DIM, seed=1).requires_grad_()
        output = function(hidden_states=x, text=text)
        loss = output["x"][0].square().sum() + output["projected"].sum()
        parameters = [p for name, p in model.named_parameters() if name.startswith(("blocks", "text"))]
        return [loss.detach(), *torch.autograd.grad(loss, [x, text, *parameters])]

    expected = gradients(model)
    split = split_model(model, 3, with_text(), partitioner="uniform")
    with torch.no_grad():
        split(**with_text())  # what is kept here must not be taken for the calls that record gradients
    for _ in range(2):
        assert_same(gradients(split), expected)


class KeptThenTrained(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(hidden_states, self.text(text))


def test_gradients_reach_what_is_otherwise_computed_once() -> None:
    model = KeptThenTrained(2)
    split = split_model(model, 2, with_text(), partitioner="uniform")
    with torch.no_grad():
        split(**with_text())
    split(**with_text()).sum().backward()
    expected = KeptThenTrained(2)
    expected(**with_text()).sum().backward()
    assert expected.text.weight.grad is not None
    assert_same(model.text.weight.grad, expected.text.weight.grad)


# ---- objects ----------------------------------------------------------------------------------------------------------


class Cache:
    """State that the caller owns: each block appends what it saw."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.bias = randn(1, 4, DIM, seed=7)


class RemembersBlock(Block):
    def forward(self, x: torch.Tensor, context: Any = None) -> torch.Tensor:
        context.seen.append(x)
        return super().forward(x, context.bias)


class UsesACache(Toy):
    def forward(self, hidden_states: torch.Tensor, cache: Any) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states, cache)
        return hidden_states + cache.bias


def test_a_callers_object_is_passed_to_the_blocks_and_written_by_them() -> None:
    assert_splits_exactly(UsesACache(3, RemembersBlock), lambda: hidden() | dict(cache=Cache()))


def test_a_capture_leaves_the_callers_object_alone() -> None:
    cache = Cache()
    capture(UsesACache(2, RemembersBlock), hidden() | dict(cache=cache))
    assert cache.seen == []
    assert not is_fake(cache.bias)


class Metadata:
    """An object that glue makes for its blocks."""

    def __init__(self, bias: torch.Tensor, scale: float) -> None:
        self.bias = bias
        self.scale = scale
        self.notes: list[int] = []


class UsesMetadata(Block):
    def forward(self, x: torch.Tensor, context: Any = None) -> torch.Tensor:
        context.notes.append(len(context.notes))
        return super().forward(x, context.bias) * (context.scale + len(context.notes))


class MakesMetadata(Toy):
    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        metadata = Metadata(self.text(text), 0.5)
        return self.run_blocks(hidden_states, metadata)


def test_an_object_made_by_glue_is_made_once_per_call_with_this_calls_tensors() -> None:
    model = MakesMetadata(2, UsesMetadata)
    with torch.no_grad():
        split = split_model(model, 2, with_text(), partitioner="uniform")
        for seed in (1, 2, 3):
            inputs = dict(hidden_states=randn(2, 4, DIM, seed=seed), text=randn(1, 4, DIM, seed=seed + 10))
            assert_same(split(**inputs), model(**inputs))


class TakesMetadata(Block):
    def forward(self, x: torch.Tensor, context: Any = None) -> torch.Tensor:
        return super().forward(x) if context is None else super().forward(x, context.bias) * context.scale


class MakesMetadataOfBlockResults(Toy):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](hidden_states)
        metadata = Metadata(x.mean(0, keepdim=True), 0.5)
        return self.blocks[2](self.blocks[1](x, metadata), metadata)


def test_an_object_may_hold_what_a_block_returned() -> None:
    assert_splits_exactly(MakesMetadataOfBlockResults(3, TakesMetadata))
