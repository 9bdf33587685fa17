"""The repository root on the path, so that a test imports the flat scripts as a user's own script would; torch on one thread."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)                                       # as fast for models this small, and steady beside other processes
