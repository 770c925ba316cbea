"""Which pipeline classes of diffusers have a diffusion transformer, and why some of them are not run."""

import importlib
import inspect
import pkgutil
import typing
from functools import cache

import diffusers
from diffusers import DiffusionPipeline

from tests.zoo.case import dit_classes

NOT_RUN: dict[str, str] = {
    "ConsisIDPipeline": "needs OpenCV and models of faces",
    "Cosmos2_5_TransferPipeline": "needs torchvision",
    "OmniGenPipeline": "needs torchvision",
    "EasyAnimateControlPipeline": "does not run in diffusers 0.42: it calls encode_prompt with an argument it does not take",
    "HunyuanVideoImageToVideoPipeline": "its text encoder, LLaVA, expects 576 tokens of a picture",
    "Kandinsky6SRPipeline": "no tiny configuration of its VAE yet",
    "LTX2DFRTemporalRefinePipeline": "no tiny configuration of its upsampler yet",
    "MotifVideoImage2VideoPipeline": "needs the vision tower of T5Gemma 2",
    "RFD4ProteinaPipeline": "its inputs are prepared molecules",
    "ZImageOmniPipeline": "needs the processor of SigLIP 2",
    "KandinskyCombinedPipeline": "runs KandinskyPriorPipeline, then a UNet",
    "KandinskyImg2ImgCombinedPipeline": "runs KandinskyPriorPipeline, then a UNet",
    "KandinskyInpaintCombinedPipeline": "runs KandinskyPriorPipeline, then a UNet",
    "KandinskyV22CombinedPipeline": "runs KandinskyV22PriorPipeline, then a UNet",
    "KandinskyV22Img2ImgCombinedPipeline": "runs KandinskyV22PriorPipeline, then a UNet",
    "KandinskyV22InpaintCombinedPipeline": "runs KandinskyV22PriorPipeline, then a UNet",
    "ShapEPipeline": "its transformer is the prior, run in the Kandinsky cases; the rest is a renderer",
    "ShapEImg2ImgPipeline": "its transformer is the prior, run in the Kandinsky cases; the rest is a renderer",
    "StableUnCLIPPipeline": "its transformer is the prior, run in the Kandinsky cases; the rest is a UNet",
}
"""Pipeline class -> why it has no case."""


@cache
def dit_pipelines() -> frozenset[str]:
    """Names of the pipeline classes one of whose components is a transformer of diffusers, deprecated ones left out."""
    found = set()
    transformers = set(dit_classes())
    for info in pkgutil.walk_packages(diffusers.pipelines.__path__, diffusers.pipelines.__name__ + "."):
        if ".deprecated" in info.name:
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # helpers of single pipelines for packages that are not installed
            continue
        for name, value in vars(module).items():
            own = inspect.isclass(value) and issubclass(value, DiffusionPipeline) and value.__module__ == info.name
            if own and transformers & _annotated(value):
                found.add(name)
    return frozenset(found)


def _annotated(pipeline_class: type) -> set[str]:
    parameters = inspect.signature(pipeline_class.__init__).parameters.values()
    kinds = {kind for p in parameters for kind in (p.annotation, *typing.get_args(p.annotation))}
    return {getattr(kind, "__name__", str(kind)) for kind in kinds}
