"""The embedded world: people, places and things generated from a seed; its tiny policy; scripted demonstrations.

A question is a dict {"question", "answers"}, an "id" where it is held out, and "documents" [{"id", "title", "text"}], which are all that is
searched for it. Facts are drawn anew for every question, so nothing can be known by heart: an answer is found by searching and
kept by remembering.

    questions = world_questions(8, seed=0, split="test")
"""
import random
import zlib
from collections.abc import Iterator
from itertools import islice

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from retriever import Retriever

# ---- people, places and things ----

KIND = {kind: words.split() for kind, words in {                # what entities are called
    "person": "Ada Bela Cora Dina Edda Fenn Gita Hugo Ines Jonas Kira Lars Mira Nils Olga Piet Quin Rosa Sven Toma Ulla Vera Willem Yara",
    "town": "Alder Brack Corwen Dorn Elmet Farrow Gilt Harl Ister Jura Kelso Lorne Marl Nidd Orrin Pell Ravn Selk Tarn Usk Velden Wick Yarrow Zell",
    "street": "Abbey Bishop Castle Chapel Church College Ferry Garden Harbour King Market Orchard "
        "Palace Priory Queen School Station Temple Theatre Tower",
    "ship": "Albatross Cormorant Curlew Dolphin Falcon Gannet Heron Kestrel Lark Merlin Osprey Petrel "
        "Plover Puffin Seagull Sparrow Swallow Tern Thrush Wren",
    "thing": "bell chair clock crown cup drum fan harp key lamp mask mirror ring robe sword vase"}.items()}
VALUE = {kind: (first.split(), second.split()) for kind, first, second in (   # two words each
    ("pet", "badger cat crow dog goat hare horse jay lamb magpie mouse newt owl "
        "parrot pony rabbit raven robin swan toad", "Bello Fleck Max Pip Rex Socks Tip Wolly"),
    ("river", "Amble Brue Clyst Dove Ebble Fal Glyme Hodder Irfon Kenn Leven Medway Neet Otter Plym Rye Swale Teme Ure Wye", "Beck Brook Run Water"),
    ("inn", "Amber Azure Bold Brave Copper Crimson Dusty Gentle Golden Jolly Laughing Merry "
        "Noble Proud Quiet Royal Silver Sleepy Wild Wise", "Anchor Bear Crane Eagle Fox Lion Stag Unicorn"),
    ("cargo", "barley butter cider cloth coal cotton flour honey hops ink lace oats "
        "pepper rope salt silk soap tea wool yarn", "bags bales barrels boxes casks crates sacks tubs"),
    ("price", "two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen twenty thirty forty fifty sixty", "crowns ducats florins groats guilders marks shillings thalers"))}
VALUE["town"] = (KIND["town"], "Bay Cross Gate Hill Mill Park Side Well".split())
# relation -> (kind of entity, kind of value), in the order in which a question's parts stand; those of VIA only lead to a town. A
# question asks about each kind once: a model of two layers finds a word by its kind long before it finds it by its key.
RELATION = {"pet": ("person", "pet"), "river": ("town", "river"), "inn": ("street", "inn"), "cargo": ("ship", "cargo"), "price": ("thing", "price"),
            "birthplace": ("person", "town"), "port": ("ship", "town"), "home": ("thing", "town")}
VIA = ("birthplace", "port", "home")
# What a question calls what documents and memories call otherwise: a word that stands in the question, too, looks like a fact already found.
ASKED = {"pet": "animal", "river": "stream", "inn": "tavern", "cargo": "load", "price": "cost"}
REMARK = {"person": ("trade", "baker clerk farmer miller potter smith".split()), "town": ("tree", "ash beech elm lime oak pine".split()),
          "street": ("shop", "bakery bookshop grocery pharmacy smithy tailor".split()), "ship": ("flag", "black blue green grey red white".split()),
          "thing": ("colour", "black blue green grey red white".split())}   # what documents say besides, and nobody asks
SHAPES = [(3, False)] * 3 + [(4, False)] * 2 + [(2, False), (2, True), (1, True)]   # parts of a question; whether one has two hops


def draw(rng: random.Random, words: list[str], taken: set) -> str:
    """A word that is not taken yet."""
    word = rng.choice([word for word in words if word not in taken])
    taken.add(word)
    return word


def draw_value(rng: random.Random, kind: str, taken: set) -> str:
    """Two words; the second follows from the first seven times in ten."""
    firsts, seconds = VALUE[kind]
    first = draw(rng, firsts, taken)
    return f"{first} {seconds[firsts.index(first) % len(seconds)] if rng.random() < 0.7 else rng.choice(seconds)}"


def draw_paths(rng: random.Random, parts: int, chain: bool) -> list[list[str]]:
    """A path of relations for each part; a chain leads through a relation of VIA, from a kind not asked about, to a town's river."""
    ends = rng.sample([r for r in RELATION if r not in VIA], parts)
    if chain and "river" not in ends:
        ends[0] = "river"
    kinds = {RELATION[end][0] for end in ends}
    via = [rng.choice([r for r in VIA if RELATION[r][0] not in kinds])] if chain else []
    return [via + [end] if end == "river" else [end] for end in sorted(ends, key=list(RELATION).index)]


def describe(rng: random.Random, entity: str, relation: str, value: str, near: str = "") -> dict:
    """The document of an entity: its title, the fact, the value right behind its relation, and a remark before or after."""
    remark, words = REMARK[RELATION[relation][0]]
    facts = [f"{relation} {value}", f"{remark} {rng.choice(words)}"]
    rng.shuffle(facts)
    return {"title": entity, "text": f"{entity} has {facts[0]}, {facts[1]}{near}."}


def world_question(rng: random.Random) -> dict:
    """One question with its own documents, and "steps": its searches as (part, entity, relation, value)."""
    taken, steps, parts, answers, documents = set(), [], [], [], []
    for part, path in enumerate(draw_paths(rng, *rng.choice(SHAPES))):
        entity = draw(rng, KIND[RELATION[path[0]][0]], taken)
        parts.append(f"{part + 1} " + " ".join(f"{word}'s" for word in (entity, *path[:-1])) + f" {ASKED[path[-1]]}")
        for relation in path:
            value = draw_value(rng, RELATION[relation][1], taken)
            steps.append((part, entity, relation, value))
            documents.append(describe(rng, entity, relation, value))
            entity = value.split()[0]
        answers.append(f"{relation} {value}")
    for _, entity, relation, _ in steps:                       # others of its kind that mention the entity, so that ranking matters
        other = draw(rng, KIND[RELATION[relation][0]], taken)
        documents.append(describe(rng, other, relation, draw_value(rng, RELATION[relation][1], taken), f", near {entity}"))
    rng.shuffle(documents)
    documents = [{"id": str(i), **document} for i, document in enumerate(documents)]
    return {"question": "Find " + ", ".join(parts) + ".", "answers": ["; ".join(answers)], "documents": documents, "steps": steps}


def split_of(question: dict) -> str:
    """train, dev or test: by the combination of entities that the question names, so that none is asked in two of them."""
    named = {part: entity for part, entity, _, _ in reversed(question["steps"])}     # of a chain the first
    return ("test", "dev", *["train"] * 8)[zlib.crc32("|".join(sorted(named.values())).encode()) % 10]


def question_stream(rng: random.Random, split: str) -> Iterator[dict]:
    """Fresh questions of a split, without end."""
    return (question for question in iter(lambda: world_question(rng), None) if split_of(question) == split)


def world_questions(n: int, seed: int, split: str) -> list[dict]:
    """n questions of a split; the same for the same seed."""
    stream = question_stream(random.Random(f"{seed} {split}"), split)
    return [{"id": f"world-{split}-{seed}-{i}", **question} for i, question in enumerate(islice(stream, n))]


# ---- the tiny policy ----

WORLD_INSTRUCTIONS = "{question}"
WORLD_TEMPLATE = ("{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
                  "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}")


def world_tokenizer() -> PreTrainedTokenizerFast:
    """Word level: one token a word, a tag or a punctuation mark; the same interface as any BPE tokenizer."""
    words = sorted({w for words in KIND.values() for w in words} | {w for lists in VALUE.values() for words in lists for w in words} | set(RELATION)
                   | set(ASKED.values()) | {w for remark, words in REMARK.values() for w in (remark, *words)})
    words += ("the The of has is Find near Nothing yet I have them all system user assistant You are a helpful assistant No results for That turn held no "
              "action End with one search access or answer There document named has pages shown").split()
    tags = [f"<{slash}{tag}>" for tag in ("mem", "think", "search", "access", "answer", "information") for slash in ("", "/")]
    vocabulary = dict.fromkeys(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", *tags, *".,;:[]&'\"", "'s", *map(str, range(10)), "lt", "gt", *words])
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>|'s\b|\w+|[^\w\s]"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   additional_special_tokens=["<|im_start|>"], chat_template=WORLD_TEMPLATE,
                                   clean_up_tokenization_spaces=False)


def world_config() -> Qwen2Config:
    """The tiny policy: a Qwen2 of 0.38 M parameters."""
    return Qwen2Config(vocab_size=len(world_tokenizer()), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                       intermediate_size=256, max_position_embeddings=2048, rope_theta=1000.0, tie_word_embeddings=True, initializer_range=0.05)


def world_policy(folder, seed: int) -> str:
    """Write the tiny policy, with random parameters, and its tokenizer to a folder, to be loaded like any other."""
    tokenizer, config = world_tokenizer(), world_config()
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# ---- cold-start demonstrations: lists of (role, text, trained); role is question, policy or result ----

def recall(steps) -> str:
    """The memory's text: a phrase a part, the value right behind its relation; what a later hop has replaced is left out."""
    return " ".join(f"{relation} {value}." for relation, value in {part: (r, v) for part, _, r, v in steps}.values()) or "Nothing yet."


def answer_pieces(question: dict, known, everything: bool = False) -> list:
    """The gold answer part by part; a fact that the context does not hold is shown but not trained, or the policy learns to guess."""
    facts, pieces = {f"{relation} {value}" for _, _, relation, value in known}, []
    for fact in question["answers"][0].split("; "):
        pieces += [("policy", ";", True)] * bool(pieces) + [("policy", fact, everything or fact in facts)]
    return pieces


def write(facts) -> list:
    """A memory; its opening tag is the loop's."""
    return [("policy", "<mem>", False), ("policy", f"{recall(facts)}</mem>", True)]


def act(question: dict, k: int, known) -> list:
    """Thought and action after k searches."""
    if k < len(question["steps"]):
        part, entity, _, _ = question["steps"][k]
        return [("policy", f"<think>{part + 1} {entity}.</think><search>{entity}</search>", True)]
    return [("policy", "<think>I have them all.</think><answer>", True), *answer_pieces(question, known), ("policy", "</answer>", True)]


def result(question: dict, retriever: Retriever, k: int) -> list:
    """What search k brings."""
    return [("result", retriever.search(question["steps"][k][1], 1), False)]


def conversation(question: dict, retriever: Retriever, searches: int, memory) -> list:
    """The script's turns until so many searches have their result, or, with one more, until the answer."""
    pieces, steps = [], question["steps"]
    for k in range(searches):
        pieces += (memory(steps[:k]) if k else []) + act(question, k, steps[:k]) + (result(question, retriever, k) if k < len(steps) else [])
    return pieces


def world_demonstration(rng: random.Random, kind: str, keep: float) -> list:
    """One scripted episode of a fresh training question, or a part of one; a known fact enters a memory with probability `keep`.

    full: the whole conversation; compressed: one turn from what it sees at evaluation; recall: the answer from a memory
    alone; history: the answer from a conversation so far. In half of the rows (but recall's) memories are whole, shown and not
    trained: how to go on from one is known before anybody writes it. In the last two kinds, which are what the teacher scores,
    three rows of ten train unknown facts too, so that P of a missing fact is low.
    """
    question, whole = next(question_stream(rng, "train")), rng.random() < 0.5
    steps, retriever = question["steps"], Retriever(question["documents"])
    kept = lambda facts: [fact for fact in facts if rng.random() < keep]
    memory = lambda facts: untrained(write(facts)) if whole else write(kept(facts))
    opening, k = [("question", question["question"], False)], rng.randint(1, len(steps))       # k searches done
    if kind == "full":
        return opening + conversation(question, retriever, len(steps) + 1, memory)
    if kind == "compressed":
        before = steps[:k - 1] if whole else kept(steps[:k - 1])
        last = (write(before) if k > 1 else []) + act(question, k - 1, [])
        known = before + [steps[k - 1]]
        return opening + untrained(last) + result(question, retriever, k - 1) + memory(known) + act(question, k, known)
    known = kept(steps[:k]) if kind == "recall" else steps[:k]
    context = write(known) if kind == "recall" else conversation(question, retriever, k, memory)
    scaffold = [("policy", "\n<think>\n...\n</think>\n<answer>\n", False)]   # the teacher's, never the policy's own words
    return opening + untrained(context) + scaffold + answer_pieces(question, known, rng.random() < 0.3)


def untrained(pieces: list) -> list:
    return [(role, text, False) for role, text, _ in pieces]


def world_demonstrations(seed: int, step: int, keep: float) -> list[list]:
    """The demonstrations of one cold-start step: two steps of three are full conversations, the third is parts."""
    rng = random.Random(f"{seed} demonstrations {step}")
    kinds = ["full"] * 16 if step % 3 < 2 else ["compressed"] * 32 + ["recall"] * 10 + ["history"] * 5
    return [world_demonstration(rng, kind, keep) for kind in kinds]
