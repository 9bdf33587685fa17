"""Checkpoints of a training run: all that a stopped run needs to go on bit for bit.

A checkpoint is one safetensors file, checkpoint-NUMBER-HASH.safetensors: written under another name, synced, renamed. So whatever bears
such a name was whole once, and its hash shows whether it still is. It holds the weights that the optimizer steps (of a bfloat16 policy
its float32 masters; a tied one once), the optimizer's moments, every random state, and as JSON where the run stands. The newest two are
kept. Nothing is ever unpickled.
"""
import hashlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

try:
    import fcntl
except ImportError:                                            # Windows
    fcntl = None

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

NAME = re.compile(r"checkpoint-(\d+)-([0-9a-f]{32})\.safetensors")
KEPT = 2
PIECE = 2 ** 24                                                # bytes of a large file that are read at once


# ---- files ----

def digest(path) -> str:
    """The first half of a file's SHA-256, in hex."""
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            hashed.update(block)
    return hashed.hexdigest()[:32]


def identity(name: str) -> str | None:
    """A hash of a file, or of the model and tokenizer files of a folder; None where nothing is local, as with a hub id.

    Of a file above 1 GiB its size and 64 pieces are read, from the beginning to the end: quick, and what was trained anew differs in all.
    """
    path, hashed = Path(name), hashlib.sha256()
    files = [f for f in path.iterdir() if f.suffix in (".json", ".jinja", ".txt", ".model", ".safetensors", ".gguf")] if path.is_dir() else [path]
    for file in sorted(filter(Path.is_file, files)):
        size = file.stat().st_size
        hashed.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as opened:
            for start in (*range(0, size, max(size // 64, PIECE)), max(size - PIECE, 0)):
                opened.seek(start)
                hashed.update(opened.read(PIECE))
    return hashed.hexdigest() if path.exists() else None


def sync(path) -> None:
    """Have the system write a file, or a folder's list of names, to the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """A text file that is there whole or not at all, whenever the process is killed."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    sync(unfinished)
    os.replace(unfinished, path)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a folder, oldest first, since their numbers have leading zeros."""
    return sorted(path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name))


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is still what was written; None if there is none at all."""
    found = checkpoints(folder)
    for n, path in enumerate(reversed(found)):
        if digest(path) == NAME.fullmatch(path.name)[2]:
            for damaged in found[len(found) - n:]:             # set aside only now: where none is whole, nothing changes
                damaged.replace(damaged.with_name(damaged.name + ".damaged"))
            return path
        print(f"{path} is damaged (its content is not what was saved); going back to the one before it", file=sys.stderr)
    if found:
        raise ValueError(f"every checkpoint in {folder} is damaged; remove the run's folder to start it again, or bring back a copy")
    return None


# ---- content ----

def random_states(generator: torch.Generator | None) -> tuple[dict, dict]:
    """(as JSON, as tensors) the states of Python, numpy, torch on CPU and GPUs, and of the run's own generator."""
    tensors = {"random.torch": torch.get_rng_state()} | {f"random.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    if generator is not None:
        tensors["random.generator"] = generator.get_state()
    name, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest]}, tensors


def set_random_states(states: dict, tensor, names, generator: torch.Generator | None) -> None:
    """What random_states took, put back; tensor(name) reads one of the names."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(tensor("random.torch"))
    for i in range(torch.cuda.device_count()):
        if f"random.cuda.{i}" in names:
            torch.cuda.set_rng_state(tensor(f"random.cuda.{i}"), i)
    if generator is not None:
        generator.set_state(tensor("random.generator"))


def save(folder: Path, state: dict, parameters: list, optimizer, generator=None) -> Path:
    """Write the next checkpoint and remove all but the newest two; what fails leaves those before it untouched."""
    states, tensors = random_states(generator)
    tensors |= {f"parameter.{i}": p.detach().contiguous() for i, p in enumerate(parameters)}
    tensors |= {f"optimizer.{i}.{name}": t for i, moments in optimizer.state_dict()["state"].items() for name, t in moments.items()}
    folder.mkdir(parents=True, exist_ok=True)
    found, unfinished = checkpoints(folder), folder / "unfinished"
    try:
        save_file(tensors, unfinished, {"state": json.dumps(state), "random": json.dumps(states)})
        sync(unfinished)
        number = int(NAME.fullmatch(found[-1].name)[1]) + 1 if found else 1
        path = folder / f"checkpoint-{number:06}-{digest(unfinished)}.safetensors"
        os.replace(unfinished, path)
        sync(folder)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise ValueError(f"cannot save a checkpoint in {folder} ({error}); " + (f"{found[-1].name} is whole: make room, then --resume goes on from it"
                         if found else "make room or give another --out")) from None
    for old in found[:1 - KEPT]:
        old.unlink()
    return path


def read(path: Path) -> dict:
    """Where the run stood."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["state"])


def restore(path: Path, parameters: list, optimizer, generator=None) -> None:
    """Fill weights, optimizer and random states in place, so a tied weight stays tied."""
    with safe_open(path, "pt") as file:
        for i, p in enumerate(parameters):
            p.data.copy_(file.get_tensor(f"parameter.{i}"))
        moments = {}
        for name in file.keys():
            if name.startswith("optimizer."):
                _, i, key = name.split(".")
                moments.setdefault(int(i), {})[key] = file.get_tensor(name)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
        set_random_states(json.loads(file.metadata()["random"]), file.get_tensor, set(file.keys()), generator)


# ---- a run ----

def lock(out: Path):
    """An open file that keeps a second process out of the run's folder for as long as this one lives (where the system has such locks)."""
    out.mkdir(parents=True, exist_ok=True)
    file = open(out / "lock", "w")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is at work in {out}; wait for it, or give another --out") from None
    return file


class Run:
    """Where a run stands, and its stops. A training loop asks `begin` where to start, writes to `files`, and tells `done` after every step."""

    def __init__(self, out: Path, every: int, settings: dict | None = None):
        self.out, self.folder, self.every, self.lock = out, out / "checkpoints", every, lock(out)
        self.path = newest(self.folder)
        fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self.state = read(self.path) if self.path else {"stage": "start", "step": 0, "seconds": 0.0, "result": {}, "sizes": {}, "skipped": 0,
                                                        "fingerprint": fingerprint}
        if self.state["fingerprint"] != fingerprint:
            raise ValueError(f"{self.path} belongs to a run with other settings than {out / 'config.json'}; bring back the run's own, "
                             "or start anew elsewhere")
        self.started, self.signal, self.inside = time.time() - self.state["seconds"], None, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.interrupt)

    def interrupt(self, number: int, frame) -> None:
        """Ctrl-C or SIGTERM: a training step is finished and saved first; anything else, and at a second signal a step, is done again later."""
        if not self.inside or self.signal:
            self.stop(number, "stopped")
        self.signal = number
        print("\nstopping after this step; once more stops at once", file=sys.stderr)

    def stop(self, number: int, words: str) -> None:
        """End the process: 130 after Ctrl-C, 0 after SIGTERM."""
        print(f"\n{words}; python train.py --resume --out {self.out} goes on", file=sys.stderr)
        sys.exit(130 if number == signal.SIGINT else 0)

    def seconds(self) -> float:
        """What the run took so far, stops not counted."""
        return time.time() - self.started

    def begin(self, stage: str, steps: int, parameters: list, optimizer, generator=None, names=()) -> int:
        """The step at which a stage of so many goes on, everything restored; a new one begins with a checkpoint, and 0.

        names: of `files` in the run's folder, to which a step appends lines; those of steps that will be done again are cut off.
        """
        self.content = parameters, optimizer, generator
        if self.state["stage"] != stage:
            self.state |= {"stage": stage, "step": 0}
            self.save()
        else:
            restore(self.path, *self.content)
        self.files = [open(self.out / name, "a", buffering=1) for name in names]
        for name, file in zip(names, self.files):
            size = self.state["sizes"].get(name, 0)
            if size > os.fstat(file.fileno()).st_size:
                raise ValueError(f"{file.name} is shorter than it was when the checkpoint was saved; bring it back, or start the run again")
            file.truncate(size)
        self.steps, self.inside = steps, self.state["step"] < steps
        return self.state["step"]

    def save(self) -> None:
        self.state["seconds"] = self.seconds()
        self.path = save(self.folder, self.state, *self.content)

    def count_skipped(self, skipped: bool, most: int) -> None:
        """Raises after `most` skipped steps in a row."""
        self.state["skipped"] = self.state["skipped"] + 1 if skipped else 0
        if self.state["skipped"] >= most:
            raise ValueError(f"the last {most} steps were skipped because loss or gradient was not finite; the weights are still those of before: "
                             f"lower the learning rate, or see {self.out / 'skipped.jsonl'} for what caused it")

    def done(self, step: int) -> None:
        """A step is over: save if it is time to, or if it is the last one or a stop is asked for; then stop."""
        self.state["step"], last = step + 1, step + 1 == self.steps
        if last or self.signal or (step + 1) % self.every == 0:
            for file in self.files:
                os.fsync(file.fileno())
                self.state["sizes"][Path(file.name).name] = os.fstat(file.fileno()).st_size
            self.save()
        self.inside = not last
        if self.signal:
            self.stop(self.signal, f"stopped after step {step + 1} of {self.state['stage']}")
