"""Inputs written as plain data become tensors."""

import json

import pytest
import torch

from dit_pipelining.errors import ConfigError
from dit_pipelining.planning.inputs import build_inputs, read_inputs, tensor


def test_descriptions_become_tensors_values_and_containers():
    built = build_inputs(
        dict(
            x=tensor(2, 3),
            mask=tensor(1, 4, dtype="bool", fill=1),
            flag={"value": None},
            tables={"tuple": [tensor(2, dtype="float32"), {"list": [tensor(1, dtype="int64")]}]},
            options={"dict": {"size": tensor(1, 2)}},
        )
    )
    assert built["x"].shape == (2, 3)
    assert built["x"].dtype == torch.bfloat16
    assert built["mask"].all()
    assert built["mask"].dtype == torch.bool
    assert built["flag"] is None
    assert isinstance(built["tables"], tuple)
    assert built["tables"][1][0].dtype == torch.int64
    assert built["options"]["size"].shape == (1, 2)


@pytest.mark.parametrize(
    ("description", "named"),
    [
        ({"shape": [1, None], "dtype": "bfloat16"}, "None"),
        ({"shape": [1], "dtype": "bfloat17"}, "bfloat17"),
        ({"shape": [1], "dtype": "float32", "fill": "ones"}, "ones"),
        ([1, 2], r"\[1, 2\]"),
    ],
)
def test_what_is_described_wrongly_is_named(description, named):
    with pytest.raises(ConfigError, match=f"input x .*{named}"):
        build_inputs({"x": description})


def test_an_inputs_file_is_checked_when_it_is_read(tmp_path):
    file = tmp_path / "inputs.json"
    file.write_text(json.dumps({"x": {"shape": [1], "dtype": "float32"}}))
    assert read_inputs(file) == {"x": {"shape": [1], "dtype": "float32"}}
    for content in ("{", "[]", '{"x": 3}'):
        file.write_text(content)
        with pytest.raises(ConfigError):
            read_inputs(file)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_inputs(tmp_path / "missing.json")
