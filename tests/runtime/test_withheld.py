"""Stand-ins for decoded data go through what pipelines do after decoding, with shapes and without memory."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from diffusers.video_processor import VideoProcessor

from dit_pipelining.comm.packing import TensorLayout
from dit_pipelining.errors import ConfigError
from dit_pipelining.runtime.withheld import Withheld, hand_through, refuse_withheld, withheld, without_data


def video(*shape: int) -> torch.Tensor:
    layout = TensorLayout(0, torch.bfloat16, shape, torch.empty(shape, device="meta").stride(), 0, False)
    return withheld(layout, torch.device("cpu"))


def test_a_video_of_a_terabyte_needs_no_memory() -> None:
    frames = video(1, 3, 10_000, 4096, 4096)
    out = (frames / 2 + 0.5).clamp(0, 1)[:, :, 5:].permute(0, 2, 3, 4, 1).float().cpu()
    assert isinstance(out, Withheld)
    assert out.shape == (1, 9_995, 4096, 4096, 3)
    assert out.dtype == torch.float32
    assert out.device == torch.device("cpu")
    array = out.numpy()
    assert array.shape == tuple(out.shape)
    assert array.dtype == np.float32
    assert array.strides == (0,) * 5


def test_it_mixes_with_ordinary_tensors() -> None:
    mean = torch.ones(1, 3, 1, 1)
    out = torch.cat([video(1, 3, 4, 4).to(mean) * mean + mean, torch.zeros(1, 3, 4, 4)])
    assert isinstance(out, Withheld)
    assert out.shape == (2, 3, 4, 4)
    assert out.to("cpu", torch.float64).dtype == torch.float64
    assert out.new_zeros(3).shape == (3,)


@pytest.mark.parametrize("kind", ["pil", "np", "pt"])
def test_processors_hand_it_through(kind: str) -> None:
    processors = {"image": VaeImageProcessor(), "video": VideoProcessor()}
    hand_through(processors.values())
    image, frames = video(1, 3, 8, 8), video(1, 3, 2, 8, 8)
    assert processors["image"].postprocess(image, output_type=kind) is image
    assert processors["video"].postprocess_video(frames, output_type=kind) is frames
    real: Any = processors["image"].postprocess(torch.zeros(1, 3, 8, 8), output_type="np")
    assert real.shape == (1, 8, 8, 3)


def test_a_model_refuses_it() -> None:
    with pytest.raises(ConfigError, match="'vae' is called with"):
        refuse_withheld("the component 'vae'", (video(1),), {})
    refuse_withheld("the component 'vae'", (torch.zeros(1),), {"x": [None]})


def test_outputs_keep_their_class() -> None:
    output = without_data(WanPipelineOutput(frames=video(1)))
    assert type(output) is WanPipelineOutput
    assert output.frames is None
    assert without_data((video(1), 3)) == (None, None)
