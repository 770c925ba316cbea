"""Recipes are scripts that import their neighbours by name; put their folder on the path for the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
