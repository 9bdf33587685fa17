"""The repository root on the path, so that a test imports the flat scripts as a user's own script would."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

torch.set_num_threads(1)                                       # as fast for models this small, and steady beside other processes
