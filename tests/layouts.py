"""How tests spread a pipeline over ranks: over two stages, and over two replicas of them that share guidance."""

from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": dict(pipeline_parallel_size=2),
    "pp2-cfg2": dict(pipeline_parallel_size=2, cfg_parallel_size=2),
}
