"""The repository root on the path, as for a user's own script, and behind it benchmarks/; torch on one thread."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
torch.set_num_threads(1)                                       # as fast for models this small, and steady beside other processes
