"""Building, loading and searching an index of generated passages, next to bm25s and rank_bm25 on the same tokens.

Passages have 100 words each, drawn by Zipf's law from a million (seed 0); a query has 10 words of one passage. What is compared is timed
in turn and again, in this process, by medians of processor time; the way from a file to an index is taken in processes of their own, in
seconds by the clock and by the processor. The last line is one JSON object.

    python benchmarks/bm25.py                                  # 20,000 passages
    python benchmarks/bm25.py --passages 100000 --hotpot hotpot_dev_distractor_v1.json     # and recall@5 of supporting titles
    python benchmarks/bm25.py --big                            # 1,000,000 passages, on the disk, without the others
"""
import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import bm25s
import numpy as np
import rank_bm25
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
import corpus  # noqa: E402
import retriever  # noqa: E402
from retriever import BM25, tokenize  # noqa: E402

K, QUERIES = 5, 256
WIKIPEDIA, WIKIPEDIA_WORDS = 21_000_000, 10_000_000             # passages, counted; different words, supposed


def word(rank: int) -> str:
    """The word of a rank in syllables, so that frequent words are short."""
    syllables = ""
    while rank:
        rank, digit = divmod(rank, 70)
        syllables += "bcdfghklmnprst"[digit // 5] + "aeiou"[digit % 5]
    return syllables


def passages(n: int, words: int = 10 ** 6) -> Iterator[str]:
    """n passages of 100 words; word r of `words` comes up with a probability of about 1 / (r ln(words))."""
    rng, spelled = np.random.default_rng(0), np.array([word(rank) for rank in range(70, 70 + words)], object)
    for start in range(0, n, 1000):
        for row in spelled[(words ** rng.random((min(1000, n - start), 100))).astype(int) - 1]:
            yield " ".join(row)


def queries(documents) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.sample(documents[rng.randrange(len(documents))]["text"].split(), 10)) for _ in range(QUERIES)]


def alternate(rounds: int, *calls) -> list[float]:
    """Call each in turn, `rounds` times -> the median seconds of processor time of each: none runs threads, and other processes may run."""
    seconds = [[] for _ in calls]
    for _ in range(rounds):
        for spent, call in zip(seconds, calls):
            start = time.process_time()
            call()
            spent.append(time.process_time() - start)
    return [median(s) for s in seconds]


def bm25s_index(tokens, backend: str = "numpy") -> bm25s.BM25:
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75, backend=backend)
    index.index(tokens, show_progress=False)
    return index


def resident(field: str) -> float:
    """VmRSS (now), RssAnon (now, without what is mapped from files) or VmHWM (the peak) of this process in MiB; Linux."""
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) / 1024


def child(what: str, path: str) -> dict:
    """In a process of its own: from a file of passages to an index ("build", "bm25s"), or to the saved one and answers ("load").

    Seconds, and those of the processor alone; peak: MiB beyond the imported packages; held: MiB when done, without what is mapped from
    files.
    """
    before, anonymous, start = resident("VmRSS"), resident("RssAnon"), time.perf_counter()
    if what == "bm25s":
        index = bm25s_index([tokenize(text) for text in retriever.texts_of(corpus.JsonLines(path))])
        return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time(), "peak": resident("VmHWM") - before,
                "words": len(index.vocab_dict)}
    found = corpus.load_corpus(path)
    index, documents = found.index, found.documents
    result = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time(), "peak": resident("VmHWM") - before,
              "held": resident("RssAnon") - anonymous, "words": len(index.vocabulary), "postings": len(index.docs),
              "index_gib": sum(file.stat().st_size for file in Path(path + ".index").glob("*/*")) / 2 ** 30}
    if what == "load":
        asked, titles = queries(documents), [documents[i]["title"] for i in range(QUERIES)]
        per_call = alternate(3, lambda: corpus.fingerprint(path), lambda: [index.search(query, K) for query in asked],
                             lambda: [found.search(query, K) for query in asked], lambda: [found.access(title) for title in titles])
        result |= dict(zip(("hash_seconds", "search", "tool_search", "tool_access"), (per_call[0], *(QUERIES / s for s in per_call[1:]))))
    return result


def in_child(what: str, path) -> dict:
    out = subprocess.run([sys.executable, __file__, "--child", what, str(path)], stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


def compare(texts: list[str], rounds: int) -> dict:
    """Build and search next to the others on the same tokens; every score of the top 5 must be equal to 1e-5."""
    tokens = [tokenize(text) for text in texts]
    asked = queries([{"text": text} for text in texts])
    asked_tokens, few = [tokenize(query) for query in asked], 4                # rank_bm25 is asked the first few only

    def build_ours():
        retriever.tokenize = list                                  # the tokens are given
        try:
            BM25(tokens)
        finally:
            retriever.tokenize = tokenize
    seconds = alternate(rounds, build_ours, lambda: bm25s_index(tokens), lambda: rank_bm25.BM25Okapi(tokens))
    result = {f"build_{name}": len(texts) / s for name, s in zip(("ours", "bm25s", "rank_bm25"), seconds)}      # passages a second
    ours, theirs, okapi = BM25(texts), bm25s_index(tokens), rank_bm25.BM25Okapi(tokens)
    calls = {"ours": lambda: [ours.search(query, K) for query in asked],
             "bm25s": lambda: theirs.retrieve(asked_tokens, k=K, show_progress=False, backend_selection="numpy"),
             "rank_bm25": lambda: [okapi.get_top_n(query, texts, K) for query in asked_tokens[:few]]}
    try:
        jitted = bm25s_index(tokens, "numba")
        calls["bm25s_numba"] = lambda: jitted.retrieve(asked_tokens, k=K, show_progress=False)
        calls["bm25s_numba"]()                                     # compiles
    except ImportError:
        result["bm25s_numba"] = "numba is not installed"
    for name, seconds in zip(calls, alternate(rounds, *calls.values())):
        result[f"search_{name}"] = (few if name == "rank_bm25" else QUERIES) / seconds
    scores = np.array([[score for _, score in hits] for hits in calls["ours"]()])
    result["max_score_difference"] = float(np.abs(scores - calls["bm25s"]().scores).max())
    assert result["max_score_difference"] < 1e-5
    return result


def recall(path: str) -> dict:
    """Recall@5 of supporting titles by the question's text, among all paragraphs of a HotpotQA file; ours and bm25s's."""
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    paragraphs = list(dict.fromkeys((title, "".join(sentences)) for row in rows for title, sentences in row["context"]))
    texts = [f"{title} {text}" for title, text in paragraphs]
    ours, theirs = BM25(texts), bm25s_index([tokenize(text) for text in texts])
    result = {"questions": len(rows), "paragraphs": len(paragraphs)}
    for name, best in (("ours", lambda q: [i for i, _ in ours.search(q, 5)]),
                       ("bm25s", lambda q: theirs.retrieve([tokenize(q)], k=5, show_progress=False, backend_selection="numpy").documents[0])):
        shares = []
        for row in rows:
            titles = {title for title, _ in row["supporting_facts"]}
            shares.append(len(titles & {paragraphs[i][0] for i in best(row["question"])}) / len(titles))
        result[name] = sum(shares) / len(shares)
    return result


def projection(n: int, build: dict, load: dict) -> dict:
    """To Wikipedia's size. Times and disk grow with the passages, the loading of the vocabulary with the words; the peak grows by what
    the code holds of each, 56 bytes a passage (its line, its two names twice, its length twice) and what a word was measured to take."""
    times, a_word = WIKIPEDIA / n, load["held"] * 2 ** 20 / load["words"]
    more_words = max(WIKIPEDIA_WORDS - load["words"], 0)
    return {"bytes_a_word": a_word, "build_minutes": build["seconds"] * times / 60, "build_cpu_minutes": build["cpu_seconds"] * times / 60,
            "index_gib": build["index_gib"] * times,
            "build_peak_gib": build["peak"] / 2 ** 10 + ((WIKIPEDIA - n) * 56 + more_words * a_word) / 2 ** 30,
            "load_cpu_seconds": load["hash_seconds"] * times + (load["cpu_seconds"] - load["hash_seconds"]) * WIKIPEDIA_WORDS / load["words"],
            "held_gib": load["held"] / 2 ** 10 + more_words * a_word / 2 ** 30, "queries_per_second": load["search"] / times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--big", action="store_true", help="1,000,000 passages, without the others, and a projection to Wikipedia's size")
    parser.add_argument("--hotpot", help="a HotpotQA file: recall@5 of its supporting titles, too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.child:
        print(json.dumps(child(*o.child)))
        return
    n = 1_000_000 if o.big else o.passages
    result = {"passages": n}
    with tempfile.TemporaryDirectory(prefix="bm25-") as folder:
        path = Path(folder) / "passages.jsonl"
        with open(path, "w") as file:
            for i, text in enumerate(tqdm(passages(n), "Generating", n, unit=" passages")):
                file.write(json.dumps({"id": str(i), "title": f"Title {i // 4}", "text": text}) + "\n")
        for what in ("build", "load") if o.big else ("build", "load", "bm25s"):
            result[what] = in_child(what, path)
    if o.big:
        result["projection"] = projection(n, result["build"], result["load"])
    else:
        result["same_tokens"] = compare(list(passages(n)), o.rounds)
    if o.hotpot:
        result["recall_at_5"] = recall(o.hotpot)
    for part, values in result.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            print(f"{part:14}{name:24}{value if isinstance(value, str) else f'{value:14,.6g}'}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
