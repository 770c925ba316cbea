"""Pipeline and CFG parallelism for hand-written pipelines, by the contract of vLLM-Omni's diffusion pipelines.

`recipes/PORTING.md` shows how to make a pipeline PP-aware, `recipes/custom_wan_pipeline.py` is one.
"""

from dit_pipelining.mixins.async_latents import AsyncLatents
from dit_pipelining.mixins.cfg_parallel import CFGParallelMixin
from dit_pipelining.mixins.intermediate_tensors import AsyncIntermediateTensors, IntermediateTensors
from dit_pipelining.mixins.layers import (
    PPMissingLayer,
    get_pp_indices,
    is_pp_missing_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
)
from dit_pipelining.mixins.parallel_state import (
    destroy_distributed_env,
    destroy_model_parallel,
    get_cfg_group,
    get_classifier_free_guidance_rank,
    get_classifier_free_guidance_world_size,
    get_dp_group,
    get_pipeline_parallel_rank,
    get_pipeline_parallel_world_size,
    get_pp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    model_parallel_is_initialized,
)
from dit_pipelining.mixins.pipeline_parallel import PipelineParallelMixin

__all__ = [
    "AsyncIntermediateTensors",
    "AsyncLatents",
    "CFGParallelMixin",
    "IntermediateTensors",
    "PPMissingLayer",
    "PipelineParallelMixin",
    "destroy_distributed_env",
    "destroy_model_parallel",
    "get_cfg_group",
    "get_classifier_free_guidance_rank",
    "get_classifier_free_guidance_world_size",
    "get_dp_group",
    "get_pipeline_parallel_rank",
    "get_pipeline_parallel_world_size",
    "get_pp_group",
    "get_pp_indices",
    "get_world_group",
    "init_distributed_environment",
    "initialize_model_parallel",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_pp_missing_parameter",
    "make_empty_intermediate_tensors_factory",
    "make_layers",
    "model_parallel_is_initialized",
]
