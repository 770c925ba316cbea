"""Clean latents and noise again, with diffusers' schedulers."""

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from dit_pipelining.mixins.denoised import add_noise, predict_clean


def flow_match() -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    return scheduler


def test_a_flow_s_clean_latents_are_where_the_velocity_leads() -> None:
    scheduler = flow_match()
    clean, noise = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    for i, t in enumerate(scheduler.timesteps):
        sigma = scheduler.sigmas[i]
        noisy = add_noise(scheduler, clean, noise, t)
        torch.testing.assert_close(noisy, sigma * noise + (1 - sigma) * clean)
        torch.testing.assert_close(predict_clean(scheduler, noise - clean, t, noisy), clean)


def test_a_multistep_scheduler_of_a_flow_adds_noise_and_predicts() -> None:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.set_timesteps(4)
    clean, noise, t = torch.randn(2, 3), torch.randn(2, 3), scheduler.timesteps[1]
    noisy = add_noise(scheduler, clean, noise, t)
    torch.testing.assert_close(predict_clean(scheduler, noise - clean, t, noisy), clean)


def test_other_schedulers_are_named() -> None:
    with pytest.raises(TypeError, match=r"DDIMScheduler has no predict_clean.*override"):
        predict_clean(DDIMScheduler(), torch.ones(1), 1, torch.ones(1))
    with pytest.raises(TypeError, match="neither add_noise nor scale_noise"):
        add_noise(object(), torch.ones(1), torch.ones(1), 1)
