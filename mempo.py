"""MemPO (arXiv 2603.00680): teacher scoring of the memories, their reward, the two advantages, the clipped loss.

Letters: N trajectories or snapshots, T positions, A answer tokens. Labels A1, A2, A3, B4-algo are the notes'. Nothing here
knows of a tokenizer's kind, a model or a retriever: tensors and plain values come in as arguments.
Left out: a critic, and the notes' padding of all 2N rows to one length (rows are sorted into micro-batches instead).

    rewards = memory_rewards(policy, tokenizer, full_trajs, mem_trajs, golds)     # then the advantages, then ppo_loss
"""
import math
from collections import defaultdict

import torch
from torch.nn.utils.rnn import pad_sequence

GATES = ("own", "full", "none")


# ---- A1: how well the gold answer is predicted ----

def build_answer(tokenizer, gold: str) -> tuple[list[int], list[int]]:
    """A1: the scored text in three pieces -> (answer_ids [A], ans_mask [A]); the mask is 1 exactly on the gold answer's tokens."""
    pieces = ("\n<think>\n...\n</think>\n<answer>\n", gold.encode("utf-8", "replace").decode(), "\n</answer>")   # lone surrogates would raise
    text_only = {"split_special_tokens": True} if hasattr(tokenizer, "added_tokens_decoder") else {}     # a gold answer's <|im_end|> is text
    ids = [tokenizer.encode(piece, add_special_tokens=False, **text_only) for piece in pieces]
    return sum(ids, []), [0] * len(ids[0]) + [1] * len(ids[1]) + [0] * len(ids[2])


def micro_batches(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Indices sorted by length and cut where rows × longest row would exceed the budget; a longer row goes alone."""
    batches = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > token_budget:
            batches.append([])
        batches[-1].append(i)
    return batches


@torch.no_grad()
def score_answers(policy, contexts: list[list[int]], answers: list[tuple[list[int], list[int]]], token_budget: int = 16384):
    """A1: log p(answer[t] | context_i, answer[<t]) where ans_mask is 1 -> N tensors [A_i], 0 elsewhere.

    The rows are right-padded micro-batches; the result does not depend on how they are cut.
    """
    rows = [context + ids for context, (ids, _) in zip(contexts, answers)]
    masks = [[0] * len(context) + mask for context, (_, mask) in zip(contexts, answers)]
    out = [None] * len(rows)
    for batch in micro_batches([len(row) for row in rows], token_budget):
        ids, select = (pad_sequence([torch.tensor(of[i]) for i in batch], batch_first=True).to(policy.device) for of in (rows, masks))  # [B,T]
        logp = policy.logprobs(ids, select.bool()).cpu()                                             # [B,T]
        for b, i in enumerate(batch):
            out[i] = logp[b, len(contexts[i]):len(rows[i])]
    return out


def branches(contexts: list[list[int]], answer: list[int], mask: list[int]) -> tuple[list[int], ...]:
    """K contexts, each followed by the answer, as a trunk [T] and branches side by side: ids, start, position, select [Q]; and where each ends [K].

    The longest context is the trunk. A branch begins at the first token that the trunk does not share, and at the context's last one at the
    latest, so that every prediction of the answer is made inside it.
    """
    trunk = max(contexts, key=len)
    ids, start, position, select, ends = [], [], [], [], []
    for context in contexts:
        shared = next((t for t, (x, y) in enumerate(zip(context, trunk)) if x != y), len(context))
        s, end = max(min(shared, len(context) - 1), 0), len(context) + len(answer)
        ids += context[s:] + answer
        start += [s] * (end - s)
        position += range(s, end)
        select += [0] * (len(context) - s) + mask
        ends.append(len(ids))
    return trunk, ids, start, position, select, ends


@torch.no_grad()
def score_branches(policy, families: list[list[list[int]]], answers: list[tuple[list[int], list[int]]], token_budget: int = 16384):
    """A1: what score_answers gives for every context, with what a family of contexts shares computed once -> a list of [A] a family.

    A family is one trajectory's snapshots, with one answer. Each full_traj is a prefix of the longest, so its branch is the answer alone;
    each mem_traj shares prompt_ids. The 2N rows cost about one pass over each trajectory. Contexts that share less only cost more.
    """
    out, which = [[] for _ in families], [f for f, contexts in enumerate(families) if contexts]
    trees = [branches(families[f], *answers[f]) for f in which]
    for batch in micro_batches([len(trunk) + len(ids) for trunk, ids, *_ in trees], token_budget):
        columns = list(zip(*(trees[i] for i in batch)))
        trunk, ids, start, position, select = (pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(policy.device)
                                               for rows in columns[:5])                               # [B,T], [B,Q] …
        logp = policy.branch_logprobs(trunk, ids, start, position, select.bool()).cpu()              # [B,Q]
        for b, (i, ends) in enumerate(zip(batch, columns[5])):
            A = len(answers[which[i]][0])
            out[which[i]] = [logp[b, end - A:end] for end in ends]
    return out


def answer_probability(logp, ans_mask, threshold: float = 0.5, gate_logp=None) -> float:
    """A1: P = exp(mean of logp over the answer tokens that pass the threshold); 0 if none passes.

    logp, ans_mask: [A]. A token passes if gate_logp (default: logp itself) > log(threshold); threshold 0 lets all pass. NaN stays NaN.
    """
    logp, mask = torch.as_tensor(logp), torch.as_tensor(ans_mask).bool()
    gate = logp if gate_logp is None else torch.as_tensor(gate_logp)
    if (logp + gate)[mask].isnan().any():                      # never to be taken for an answer that nobody knows
        return math.nan
    passed = mask & (gate > math.log(threshold) if threshold > 0 else True)
    return math.exp(logp[passed].double().mean()) if passed.any() else 0.0


def memory_rewards(policy, tokenizer, full_trajs, mem_trajs, golds: list[str], threshold: float = 0.5, gate: str = "own",
                   token_budget: int = 16384) -> list[list[tuple[float, float]]]:
    """A1: (P_mem, P_full) of every memory turn; the reward of turn k is P_mem_k − P_full_k.

    full_trajs, mem_trajs: a list of snapshots a trajectory; golds: one answer a trajectory. All N snapshots are scored as one batch of
    2N rows, by score_branches where the policy can read branches. gate: whose log-probabilities decide which tokens count: "own" (the
    notes: each side's), "full" (the full side's for both, so that what the history makes certain must be carried), "none" (no threshold).
    """
    if gate not in GATES:
        raise ValueError(f"unknown gate {gate!r}; use own, full or none")
    built = {gold: build_answer(tokenizer, gold) for gold in set(golds)}
    answers, families = [built[gold] for gold in golds], [full + mem for full, mem in zip(full_trajs, mem_trajs)]
    if getattr(policy, "branch_logprobs", None):
        logp = score_branches(policy, families, answers, token_budget)
    else:
        flat = sum(families, [])                                                                     # [2N]
        rows = iter(score_answers(policy, flat, [answer for answer, family in zip(answers, families) for _ in family], token_budget))
        logp = [[next(rows) for _ in family] for family in families]
    tau = 0.0 if gate == "none" else threshold
    return [[(answer_probability(mem, mask, tau, full if gate == "full" else None), answer_probability(full, mask, tau))
             for full, mem in zip(rows, rows[len(rows) // 2:])] for rows, (_, mask) in zip(logp, answers)]


# ---- B4-algo, A2, A3: advantages ----

def normalise(values: list[float]) -> list[float]:
    """(x − mean) / (std + 1e-6), sample std; 0 for a group of one or without spread."""
    x = torch.tensor(values, dtype=torch.float64)
    if len(x) < 2 or x.max() == x.min():
        return [0.0] * len(x)
    return ((x - x.mean()) / (x.std() + 1e-6)).tolist()


def compute_grpo_outcome_advantage(scores, group_ids, response_mask) -> torch.Tensor:
    """B4-algo: (score_i − mean_g) / (std_g + 1e-6) on every response token of trajectory i. [N], N hashables, [N,T] -> [N,T]"""
    groups = defaultdict(list)
    for i, g in enumerate(group_ids.tolist() if torch.is_tensor(group_ids) else group_ids):      # tensors would hash by identity
        groups[g].append(i)
    adv = torch.zeros(len(group_ids), 1)
    for members in groups.values():
        adv[members, 0] = torch.tensor(normalise([float(scores[i]) for i in members]))
    return adv.to(response_mask.device) * response_mask                                               # [N,1] · [N,T]


def compute_grpo_memory_advantage(mem_rewards, mem_spans, group_ids, response_mask) -> torch.Tensor:
    """A2: mem_reward_i,k normalised over all memory turns of all trajectories of the question, on that span's tokens. -> [N,T]

    mem_rewards, mem_spans: a list a trajectory, one float and one [start, end) a memory turn.
    """
    groups = defaultdict(list)
    for i, g in enumerate(group_ids.tolist() if torch.is_tensor(group_ids) else group_ids):
        if len(mem_rewards[i]) != len(mem_spans[i]):
            raise ValueError(f"trajectory {i} has {len(mem_rewards[i])} memory rewards for {len(mem_spans[i])} memory spans")
        groups[g] += [(i, start, end, float(r)) for r, (start, end) in zip(mem_rewards[i], mem_spans[i])]
    adv = torch.zeros(response_mask.shape)
    for turns in groups.values():
        for (i, start, end, _), a in zip(turns, normalise([r for *_, r in turns])):
            adv[i, start:end] = a
    return adv.to(response_mask.device) * response_mask


def compute_advantage(outcome_adv, memory_adv, response_mask, memory_weight: float = 1.0) -> torch.Tensor:
    """A3: final_adv = (outcome_adv + w · memory_adv) · response_mask, all [N,T]."""
    return (outcome_adv + memory_weight * memory_adv) * response_mask


# ---- the update ----

def masked_mean(x, mask) -> torch.Tensor:
    """Mean of x where mask; 0, with zero gradient, if nothing is. What stands elsewhere, NaN included, has no part in it."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def ppo_loss(logp, old_logp, advantages, mask, clip_low: float = 0.2, clip_high: float = 0.2) -> tuple[torch.Tensor, dict]:
    """−mean over trained tokens of min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A), r = exp(logp − old_logp). All [N,T].

    old_logp is what the sampler recorded, fixed over all passes. The dict holds detached figures over trained tokens:
    tokens, max |r − 1|, mean KL(rollout ‖ replay) by the k3 estimator, and the fraction where the clip decides.
    """
    mask = torch.as_tensor(mask).bool()
    delta = torch.where(mask, logp, 0) - torch.where(mask, old_logp, 0)       # guarded before exp, so also in the backward pass
    advantages = torch.where(mask, advantages, 0)
    ratio = torch.where(advantages == 0, 0, delta).exp()                      # an overflowing ratio times no advantage would be NaN
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -masked_mean(torch.minimum(unclipped, clipped), mask)
    with torch.no_grad():
        ratio = delta.clamp(max=80).exp()                                     # finite, so that it can be logged
        stats = {"tokens": int(mask.sum()), "max_ratio_dev": float(torch.where(mask, ratio - 1, 0).abs().max()) if mask.numel() else 0.0,
                 "kl": float(masked_mean(ratio - 1 - delta, mask)), "clip_fraction": float(masked_mean((clipped < unclipped).float(), mask))}
    return loss, stats


def kl_to_reference(logp, ref_logp, mask) -> torch.Tensor:
    """The k3 estimator of KL(policy ‖ reference), mean over trained tokens: exp(d) − d − 1 with d = ref_logp − logp. [N,T] -> []"""
    mask = torch.as_tensor(mask).bool()
    d = torch.where(mask, ref_logp, 0) - torch.where(mask, logp, 0)
    return masked_mean(d.exp() - d - 1, mask)
