"""benchmarks/run.py: both sides do the same work, and the growth table counts it right."""
import pytest
import run
from policy import load_policy
from world import world_policy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_policy(world_policy(tmp_path_factory.mktemp("init"), 0))


def test_both_sides_of_a_rollout_say_the_same_and_read_what_they_must(tiny):
    """Keeps out a peer that does other work: each side asserts its own tokens; ours reads everything once, the peer a conversation a turn."""
    policy, tokenizer = tiny
    work, ours, peer = run.Work(tokenizer, 4, 2, 3, 20, 8, 12), {}, {}
    work.ours(policy.model, ours), work.peer(policy.model, peer)
    prompts, reply, mem = list(map(len, work.prompts)), len(work.reply), len(work.chat.mem)
    said = [[len(turn) for turn in script] for script in work.scripts]                        # [B][turn]
    assert ours["prefilled"] == sum(prompts[::2]) + 4 * 2 * (reply + mem) + 4 * 2             # a token sampled last is read with the reply
    assert ours["decoded"] == peer["decoded"] == sum(sum(row) for row in said) - 4 * 3
    assert peer["prefilled"] == sum(3 * p + 2 * a + b + 3 * (reply + mem) for p, (a, b, _) in zip(prompts, said))


def test_growth_is_linear(tiny):
    """Keeps out a loop that reads a conversation again: twice the turns cost about twice the tokens, and the peer's about four times."""
    rows = {part: (peer, ours) for part, _, peer, ours, *_ in run.growth_rows(tiny[0].model, tiny[1], (4, 8))}
    (peer4, ours4), (peer8, ours8) = (rows[f"{turns} turns: tokens prefilled"] for turns in (4, 8))
    assert ours8 / ours4 < 2.4 and peer8 / peer4 > 3.6
    (peer4, ours4), (peer8, ours8) = (rows[f"{turns} turns: tokens scored"] for turns in (4, 8))
    assert ours8 / ours4 < 2.4
