"""Split diffusion transformers into pipeline stages, and run unmodified diffusers pipelines over them."""

__version__ = "0.1.0"
