"""Load a modular pipeline of diffusers around components that are there already."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dit_pipelining.errors import ModelNotFoundError
from dit_pipelining.weights.pipelines import DtypeChoice


def load_modular(
    pipeline_class: Any, folder: Path, dtype: DtypeChoice, variant: str | None, given: Mapping[str, Any]
) -> Any:
    """The modular pipeline of a folder.

    Args:
        pipeline_class: `ModularPipeline`, which finds the class that belongs to the folder, or that class.
        folder: of a plain pipeline, with a model_index.json.
        dtype: of the weights that are loaded here.
        variant: of their files.
        given: components that are not loaded here, and values of the pipeline's configuration. What this pipeline does not
            use is left out.

    Raises:
        ModelNotFoundError: a component could not be loaded.
    """
    pipeline = pipeline_class.from_pretrained(str(folder))
    known = {*pipeline.component_names, *pipeline.config}
    missing = [
        name
        for name in pipeline.pretrained_component_names
        if name not in given and pipeline.get_component_spec(name).pretrained_model_name_or_path is not None
    ]
    chosen = {key: value for key, value in (("dtype", dtype), ("variant", variant)) if value is not None}
    pipeline.load_components(missing, **chosen)
    lacking = [name for name in missing if getattr(pipeline, name, None) is None]
    if lacking:
        raise ModelNotFoundError(
            f"{', '.join(lacking)} of {type(pipeline).__name__} could not be loaded from {folder}; diffusers has said why "
            "above. Copy the folder again, or pass them as arguments."
        )
    pipeline.update_components(**{name: value for name, value in given.items() if name in known})
    return pipeline
