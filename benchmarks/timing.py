"""What the benchmarks share: functions timed in turn in one process, and this process's memory."""
import time
from pathlib import Path

import torch
from tqdm import tqdm


def now() -> float:
    """Seconds, after whatever a GPU still has to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def alternate(calls, rounds: int, warm: int = 1, name: str | None = None) -> list[list[float]]:
    """Call every function in turn, `rounds` times after `warm` unmeasured rounds -> seconds of each.

    A function that prepares something first returns the seconds of the rest itself.
    """
    seconds = [[] for _ in calls]
    turns = [(i, c) for i in range(warm + rounds) for c in range(len(calls))]
    for i, c in tqdm(turns, name, leave=False, disable=name is None):
        start = now()
        own = calls[c]()
        if i >= warm:
            seconds[c].append(own if isinstance(own, float) else now() - start)
    return seconds


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the peak since it was reset) of this process, in bytes; Linux."""
    return 1024 * int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])
