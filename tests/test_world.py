"""The embedded world's promises: its questions, its documents, its tokenizer, its demonstrations."""
import random
from collections import Counter

from agent_loop import information
from chat import Chat
from retriever import Retriever
from train import render
from world import ASKED, RELATION, world_demonstration, world_demonstrations, world_questions, world_tokenizer


# ---- the embedded world ----

def test_world_is_the_same_for_a_seed_and_other_for_another():
    """Keeps out questions that cannot be generated again."""
    assert world_questions(5, 3, "test") == world_questions(5, 3, "test")
    assert world_questions(5, 3, "test") != world_questions(5, 4, "test")


def test_splits_share_no_combination_of_entities():
    """Keeps out a held-out question that was trained on: chains differ by their hidden town, too, and are asked in the same words."""
    asked = {split: {q["question"] for q in world_questions(3000, 0, split)} for split in ("train", "dev", "test")}
    assert not asked["train"] & asked["test"] and not asked["train"] & asked["dev"] and not asked["dev"] & asked["test"]
    assert all("'s birthplace's stream" in " ".join(questions) for questions in asked.values())


def test_every_step_is_answered_by_its_search_and_by_nothing_in_the_question():
    """Keeps out questions that cannot be answered, or can be without searching."""
    for q in world_questions(200, 1, "test"):
        retriever = Retriever(q["documents"])
        for _, entity, relation, value in q["steps"]:
            first = retriever.search(entity, 5).split("\n")[0]
            assert first.startswith(f"[1] {entity}:") and f"{relation} {value}" in first
            assert value not in q["question"]
        for part, answer in enumerate(q["answers"][0].split("; ")):
            assert answer == [f"{r} {v}" for p, _, r, v in q["steps"] if p == part][-1]


def test_retrieval_has_something_to_rank():
    """Keeps out a world in which every search has one hit only."""
    hits = [len(Retriever(q["documents"]).index.search(s[1], 5)) for q in world_questions(100, 2, "test") for s in q["steps"]]
    assert sum(h > 1 for h in hits) / len(hits) > 0.4


def test_question_shapes_cover_two_to_four_facts_and_chains():
    """Keeps out a world without multi-objective or two-hop questions."""
    parts = Counter(len(q["answers"][0].split("; ")) for q in world_questions(300, 0, "train"))
    assert set(parts) == {1, 2, 3, 4}
    chains = [q for q in world_questions(300, 0, "train") if len(q["steps"]) > len(q["answers"][0].split("; "))]
    q = chains[0]
    (_, first, r1, value), (_, second, r2, _) = next((a, b) for a, b in zip(q["steps"], q["steps"][1:]) if a[0] == b[0])
    assert value.split()[0] == second and f"{first}'s {r1}'s {ASKED[r2]}" in q["question"] and RELATION[r1][1] == RELATION[r2][0]


def test_tiny_tokenizer_knows_every_word_of_the_world():
    """Keeps out <unk> in questions, results, notices and demonstrations."""
    chat = Chat(world_tokenizer())
    unknown = chat.tokenizer.unk_token_id
    for step in range(6):
        for d in world_demonstrations(0, step, 0.5):
            assert unknown not in render(chat, d)[0]
    for q in world_questions(50, 0, "test"):
        assert unknown not in chat.encode(information(Retriever(q["documents"]).search(q["steps"][0][1], 5)))


def test_a_sentence_is_one_token_a_word_and_reads_back():
    """Keeps out a tokenizer that glues tags or marks to words."""
    tokenizer = world_tokenizer()
    assert tokenizer.tokenize("<mem>birthplace Velden Bay.</mem><think>Mira's") == \
        ["<mem>", "birthplace", "Velden", "Bay", ".", "</mem>", "<think>", "Mira", "'s"]
    assert tokenizer.decode(tokenizer.encode("<mem>river Wye Run.</mem>")) == "<mem> river Wye Run . </mem>"


# ---- demonstrations ----

def test_demonstrated_memories_keep_about_half():
    """Keeps out a cold start that already teaches to remember: memories that are whole are shown, and never trained."""
    rng, kept, known = random.Random(0), 0, 0
    for _ in range(300):
        d = world_demonstration(rng, "full", 0.5)
        facts = 0
        for role, text, trained in d:
            facts += role == "result"
            if role == "policy" and text.endswith("</mem>") and trained:
                kept += text.count(".") - ("Nothing yet." in text)
                known += facts
    assert 0.40 < kept / known < 0.52                          # a later hop replaces the earlier, so a little below one half


def test_unknown_values_are_shown_but_not_trained():
    """Keeps out demonstrations that teach to guess what the memory has lost."""
    rng = random.Random(1)
    for _ in range(200):
        d = world_demonstration(rng, "compressed", 0.5)
        seen = " ".join(text for role, text, trained in d if role == "result" or (text.endswith("</mem>") and not trained))
        if any("<answer>" in text for _, text, _ in d):
            start = next(i for i, (_, text, _) in enumerate(d) if text.endswith("<answer>"))
            for _, text, trained in d[start + 1:-1]:
                if text != ";":
                    assert trained == (text in seen), (text, seen)


def test_forced_memory_tag_and_results_are_never_trained():
    """Keeps out a mask that trains what the loop or the tool writes."""
    chat = Chat(world_tokenizer())
    for d in world_demonstrations(5, 0, 0.5):
        ids, mask = render(chat, d)
        trained = chat.decode([i for i, m in zip(ids, mask) if m])
        assert len(ids) == len(mask) and "<mem>" not in trained and "<information>" not in trained and "</answer>" in trained
