"""The decode step at fixed shapes (captured.py). Run: python -m pytest tests/test_captured.py -q"""
import random
from types import SimpleNamespace

import pytest
import torch

import captured
from agent_loop import rollout
from captured import Captured
from helpers import tiny_model
from policy import load_policy
from world import world_policy, world_questions

V = 40
MODEL = tiny_model(V)


def plain(ids: list[int]) -> torch.Tensor:
    """Logits after one unpadded row by transformers alone, [V]."""
    with torch.no_grad():
        return MODEL(torch.tensor([ids])).logits[0, -1]


@pytest.fixture
def graphs(monkeypatch):
    """Functions in place of CUDA graphs: filled anew in place, and tied to the stores on which they were captured."""
    counts = SimpleNamespace(captures=0, replays=0)

    def capture(run):
        cache = next(cell.cell_contents for cell in run.__closure__ if isinstance(cell.cell_contents, captured.FixedCache))
        place, out = [store.data_ptr() for store in cache.keys + cache.values], run()
        counts.captures += 1

        def replay():
            assert [store.data_ptr() for store in cache.keys + cache.values] == place, "the stores have moved"
            counts.replays += 1
            return out.copy_(run())
        return replay
    monkeypatch.setattr(captured, "capture", capture)
    return counts


def policy(model=MODEL, slots: int = 16) -> Captured:
    made = Captured(model)
    made.graphs, made.slots = True, slots
    return made


@pytest.mark.parametrize("seed", range(4))
def test_fixed_shapes_change_nothing(seed, graphs):
    """Keeps out rows behind the running ones that write over another's tokens, slots not yet written that are seen, a graph replayed on
    stores that have moved, and logits that the next replay overwrites."""
    rng, made = random.Random(seed), policy()
    cache, rows, kept = made.new_cache(5, 300), [[] for _ in range(5)], []
    for move in range(60):
        n = rng.randint(1, 5)
        size = 1 if rng.random() < 0.8 else 9
        fed = [[rng.randrange(V) for _ in range(size)] for _ in range(n)]
        logits = made.step(torch.tensor(fed), [size] * n, cache)
        for b in range(n):
            rows[b] += fed[b]
            kept.append((logits[b], plain(rows[b])))
        a, b = rng.sample(range(5), 2)
        cache.swap(a, b)
        rows[a], rows[b] = rows[b], rows[a]
    for got, right in kept:
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)
    assert cache.length.tolist() == [len(row) for row in rows] and max(map(len, rows)) > 64 and graphs.replays > 0


def test_a_row_that_is_full_stays_behind(graphs):
    """Keeps out a write behind the last slot of a full row that only waits, and a full row that is fed on."""
    made = policy()
    cache, rows = made.new_cache(4, 20), [[1 + b] * length for b, length in enumerate((7, 7, 7, 20))]
    made.step(torch.tensor([row + [0] * (20 - len(row)) for row in rows]), list(map(len, rows)), cache)
    for i in range(13):
        logits = made.step(torch.tensor([[i]] * 3), [1] * 3, cache)
        for b in range(3):
            rows[b].append(i)
            torch.testing.assert_close(logits[b], plain(rows[b]), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="the cache holds 20 tokens a row and 21 were fed"):
        made.step(torch.tensor([[0]] * 3), [1] * 3, cache)


def test_few_shapes_are_captured(graphs):
    """Keeps out a capture for every number of running rows and every length."""
    made = policy(slots=64)
    cache = made.new_cache(8, 1000)
    made.step(torch.ones(8, 30, dtype=torch.long), [30] * 8, cache)
    for t in range(100):
        made.step(torch.ones(8 - t // 13, 1, dtype=torch.long), [1] * (8 - t // 13), cache)
    assert graphs.captures <= 6 and graphs.replays == 100 - graphs.captures      # N is 8, 4, 2, 1 and K 64, 128, 192


def test_a_rollout_is_the_plain_policys(tmp_path, graphs):
    """Keeps out another sampled token, or another log-probability, anywhere in the loop: shared prompts, swapped and finished rows."""
    loaded, tokenizer = load_policy(world_policy(tmp_path, 0), device="cpu")
    questions = world_questions(3, 0, "train")
    both = [rollout(made, tokenizer, questions, group_size=4, max_turns=4, max_turn_tokens=20, instructions="{question}",
                    generator=torch.Generator().manual_seed(0)) for made in (loaded, policy(loaded.model, 64))]
    for a, b in zip(*both, strict=True):
        assert a.response_ids == b.response_ids and a.stop_reason == b.stop_reason
        torch.testing.assert_close(torch.tensor(a.rollout_logprobs), torch.tensor(b.rollout_logprobs), atol=1e-5, rtol=1e-5)
    assert graphs.replays > graphs.captures
