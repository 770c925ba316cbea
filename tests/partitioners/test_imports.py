import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PLAN = """
import sys
sys.modules["torch"] = None  # an import of torch, even one that is caught, would raise
sys.modules["dit_pipelining"] = None
import partitioners
costs = partitioners.ModelCosts.uniform(30)
print(partitioners.resolve_partition("balanced", costs, [partitioners.RankSpec()] * 4, environment={}))
"""


def test_partitions_are_planned_without_torch() -> None:
    # -I -S: no site-packages and no inherited settings, so nothing but the standard library can be imported.
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}){PLAN}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "7,8,8,7"
