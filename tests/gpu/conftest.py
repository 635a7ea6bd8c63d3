"""The rigs of a rank and an agent lie beside the worker's other tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
