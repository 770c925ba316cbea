"""A picture that most tests of drawings look at."""

import json

import pytest

from dit_pipelining.cli.study import Question, study
from dit_pipelining.config import ParallelConfig
from tests.zoo import CASES


@pytest.fixture(scope="session")
def flux_config(tmp_path_factory):
    """The config of a FLUX of two double and four single blocks."""
    case = CASES["FluxTransformer"]
    file = tmp_path_factory.mktemp("flux") / "config.json"
    init = {**case.init, "num_layers": 2, "num_single_layers": 4}
    file.write_text(json.dumps({"_class_name": case.model_class, **init}))
    return file


@pytest.fixture(scope="session")
def picture(flux_config):
    """A small FLUX over three stages, with three requests of four steps."""
    question = Question(
        model=str(flux_config),
        config=ParallelConfig(pipeline_parallel_size=3, ranks="rtx4090"),
        requests=3,
        steps=4,
        guidance="two-calls",
        compare=("uniform", "balanced"),
    )
    return study(question)
