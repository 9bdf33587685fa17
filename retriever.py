"""BM25 over an in-process corpus, and the two tools that an agent calls on it: search and access (C4).

    retriever = Retriever([{"id": "7", "title": "Bergen", "text": "Bergen is a city in Norway."}])
    retriever.search("city norway")      # '[1] Bergen: Bergen is a city in Norway.'
    retriever.access("bergen")           # ['Bergen is a city in Norway.']

Every score is computed once, while indexing, and kept in a sparse matrix by term; a search only adds rows of it.
The index is built in memory. What a retriever returns is plain text: tags in it are for the agent loop to neutralise.

Letters: N documents, V terms, P postings (one for each document and each different word in it), M tokens in all.
Papers: Robertson & Zaragoza 2009 (BM25); Kamphuis et al. 2020 (Lucene's variant); Lù 2024 (eager scores).
"""
import json
import os
import re
import unicodedata
from array import array
from functools import cached_property
from pathlib import Path

import numpy as np

# ---------------------------------------------------------------------------------------------------------- words
# \w knows letters and digits, but not the marks set on or around them (accents, vowel signs): here those of Unicode's
# first plane, where all but rare and historic scripts lie.
MARKS = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M")
WORD = re.compile(rf"\w+(?:[{MARKS}]+\w*)*")
# Han, Hiragana and Katakana are written without spaces (the punctuation between them is no WORD anyway).
CJK = re.compile("([\u3005-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")


def tokenize(text: str) -> list[str]:
    """The words of a document or of a query: one function for both sides.

    NFKC and lower case; runs of letters, digits and "_" with their marks; each Han, Hiragana or Katakana character by
    itself. Korean words are split at spaces only, as are those of scripts without spaces (Thai, Lao, Khmer).
    Nothing is stemmed and no word is left out.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    return WORD.findall(text if text.isascii() else CJK.sub(r" \1 ", text))


# ----------------------------------------------------------------------------------------------------------- BM25
def idf(N: int, df):
    """C4, inverse document frequency: ln(1 + (N - df + 0.5) / (df + 0.5)), above 0 even for a word in every document."""
    return np.log(1 + (N - df + 0.5) / (df + 0.5))


def tf_part(tf, dl, avgdl: float, k1: float, b: float):
    """C4, saturated term frequency: tf / (tf + k1 (1 - b + b dl / avgdl)), without the constant factor k1 + 1."""
    return tf / (tf + k1 * (1 - b + b * dl / avgdl))


def top_k(scores, k: int):
    """scores [N] -> the indices of the k best above 0: score descending, then index ascending.

    The order is total, so every top-k is the head of the top-(k+1), whatever the ties.
    """
    hits = np.flatnonzero(scores > 0)                              # [hits], index ascending
    if k < len(hits):                                              # keep all that tie with the k-th, then sort only these
        kth = np.partition(scores[hits], len(hits) - k)[len(hits) - k]
        hits = hits[scores[hits] >= kth]
    return hits[np.argsort(-scores[hits], kind="stable")[:k]]      # [<= k]


class BM25:
    """score(q, d) = sum over the words t of q of idf(t) * tf_part(t, d), a word that stands twice in q counting twice.

    Empty documents count in N and in the average length avgdl. `texts` is read once, in order.
    """
    ARRAYS = ("indptr", "docs", "scores")
    VOCABULARY = "vocabulary.json"

    def __init__(self, texts: list[str], k1: float = 1.5, b: float = 0.75):
        if k1 < 0 or not 0 <= b <= 1:
            raise ValueError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, not k1={k1}, b={b}.")
        self.vocabulary: dict[str, int] = {}                       # word -> term number, in order of appearance
        terms, lengths = array("i"), []                            # [M], [N]
        for text in texts:
            tokens = tokenize(text)
            terms.extend([self.vocabulary.setdefault(token, len(self.vocabulary)) for token in tokens])
            lengths.append(len(tokens))
        self.N, V = len(lengths), len(self.vocabulary)

        # One number for each token, term * N + document: sorting and counting these gives the postings by term.
        cells = np.array(terms, np.int64) * self.N + np.repeat(np.arange(self.N), lengths)     # [M]
        cells, tf = np.unique(cells, return_counts=True)           # [P], [P]
        term, doc = np.divmod(cells, self.N)                       # [P], [P]
        df = np.bincount(term, minlength=V)                        # [V]
        dl = np.array(lengths)                                     # [N]
        avgdl = dl.sum() / max(self.N, 1)

        self.indptr = np.concatenate(([0], np.cumsum(df)))         # [V + 1]: term t owns postings indptr[t] : indptr[t+1]
        self.docs = doc.astype(np.int32)                           # [P]
        self.scores = (idf(self.N, df)[term] * tf_part(tf, dl[doc], avgdl, k1, b)).astype(np.float32)    # [P]

    def search(self, query: str, k: int = 5) -> list[tuple[int, float]]:
        """The k best (document index, score) with score > 0, best first, ties by lower index."""
        if k < 1:
            raise ValueError(f"k is {k}: a search must ask for at least 1 document.")
        scores = np.zeros(self.N, np.float32)                      # [N]
        for token in tokenize(query):
            if (t := self.vocabulary.get(token)) is not None:      # term 0 is a word like any other
                postings = slice(self.indptr[t], self.indptr[t + 1])
                scores[self.docs[postings]] += self.scores[postings]      # no document stands twice in a row: += is safe
        return [(int(d), float(scores[d])) for d in top_k(scores, k)]

    def save(self, folder) -> None:
        """Write three .npy arrays and, last, the vocabulary: without it a folder is an unfinished save and does not load."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.VOCABULARY).unlink(missing_ok=True)
        for name in self.ARRAYS:                                   # replaced, not overwritten: self may map the old file
            np.save(folder / "unfinished.npy", getattr(self, name))
            os.replace(folder / "unfinished.npy", folder / f"{name}.npy")
        (folder / self.VOCABULARY).write_text(json.dumps({"documents": self.N, "terms": list(self.vocabulary)}))

    @classmethod
    def load(cls, folder) -> "BM25":
        """The index that save() wrote, with equal results; its arrays stay on disk, memory-mapped."""
        index, folder = cls.__new__(cls), Path(folder)
        try:
            saved = json.loads((folder / cls.VOCABULARY).read_text())
            index.N, index.vocabulary = saved["documents"], {term: t for t, term in enumerate(saved["terms"])}
            for name in cls.ARRAYS:
                setattr(index, name, np.load(folder / f"{name}.npy", mmap_mode="r"))
            whole = (len(index.indptr) == len(index.vocabulary) + 1
                     and index.indptr[-1] == len(index.docs) == len(index.scores))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"There is no whole BM25 index in {folder}: {Path(error.filename).name} is missing; "
                                    "build the index and save() it there.") from None
        except (ValueError, TypeError, KeyError, EOFError):        # what broken JSON and broken .npy files raise
            whole = False
        if not whole:
            raise ValueError(f"The BM25 index in {folder} is damaged: build it again and save() it there.")
        return index


# ---------------------------------------------------------------------------------------------------------- tools
def title_and_text(documents, i: int) -> tuple[str, str]:
    """Document i, checked where it is read, so that a large corpus need not be read through to be used."""
    document = documents[i]
    if not (isinstance(document, dict)
            and isinstance(document.get("title"), str) and isinstance(document.get("text"), str)):
        raise ValueError(f"Document {i} must be a dict with a string 'title' and a string 'text', not {document!r:.80}.")
    return document["title"], document["text"]


def fold(name: str) -> str:
    """A name as it is looked up when it is not found as written: case ignored, white space joined."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


class Retriever:
    """The agent's two tools over a list of documents {"id", "title", "text"}; "id" may be missing.

    max_doc_chars: of each document's text in a search result. page_chars, max_pages: of a document read by access.
    index: a BM25 over title + " " + text of these very documents (a loaded one, say); it is built here if not given.
    """

    def __init__(self, documents, max_doc_chars: int = 5000, page_chars: int = 25000, max_pages: int = 10,
                 index: BM25 | None = None):
        if min(max_doc_chars, page_chars, max_pages) < 1:
            raise ValueError(f"{max_doc_chars=}, {page_chars=} and {max_pages=} must each be at least 1.")
        self.documents = documents
        self.max_doc_chars, self.page_chars, self.max_pages = max_doc_chars, page_chars, max_pages
        self.index = index or BM25(" ".join(title_and_text(documents, i)) for i in range(len(documents)))
        if self.index.N != len(documents):
            raise ValueError(f"The index holds {self.index.N} documents, but {len(documents)} were given: "
                             "build it from these documents.")

    def search(self, query: str, k: int = 5) -> str:
        """What goes inside <information>: the k best documents, numbered, or a sentence that there is none.

        Each text is cut before the results are put together: a long document never costs the next one its place.
        """
        results = []
        for rank, (i, _) in enumerate(self.index.search(query, k), 1):
            title, text = title_and_text(self.documents, i)
            results.append(f"[{rank}] {title}: {text[:self.max_doc_chars]}")
        return "\n".join(results) or f'No results for "{query.strip()}".'

    @cached_property
    def names(self) -> tuple[dict[str, int], dict[str, int]]:
        """(name as written -> document, folded name -> document), made at the first access: not every question needs it."""
        exact, folded = {}, {}
        titles = (title_and_text(self.documents, i)[0] for i in range(len(self.documents)))
        ids = ("" if document.get("id") is None else str(document["id"]) for document in self.documents)
        for name_of_each in (titles, ids):                         # a title goes before an id: search shows titles only
            for i, name in enumerate(name_of_each):
                exact.setdefault(name, i)
                folded.setdefault(fold(name), i)
        return exact, folded

    def access(self, name: str) -> list[str]:
        """The pages of the document with this title or id; [] if there is none.

        As written, else with case and white space ignored. Of several documents with one title the first in the corpus
        is read, and the others by their ids. A document without text has one page: its title.
        """
        exact, folded = self.names
        i = exact.get(name, folded.get(fold(name)))
        if i is None or not name.strip():
            return []
        title, text = title_and_text(self.documents, i)
        text = text if text.strip() else title
        starts = range(0, min(max(len(text), 1), self.max_pages * self.page_chars), self.page_chars)
        return [text[start:start + self.page_chars] for start in starts]
