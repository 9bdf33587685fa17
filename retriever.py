"""BM25 over an in-process corpus, and the two tools that an agent calls on it: search and access (C4).

    retriever = Retriever([{"id": "7", "title": "Bergen", "text": "Bergen is a city in Norway."}])
    retriever.search("city norway")      # '[1] Bergen: Bergen is a city in Norway.'
    retriever.access("bergen")           # ['Bergen is a city in Norway.']

Every score is computed once, while indexing, and kept in a sparse matrix by term; a search only adds rows of it. Texts are read once and
indexed block by block; given a folder, blocks and index lie on disk, and memory stays bounded. What a retriever returns is plain text: tags
in it are for the agent loop to neutralise.

Letters: N documents, V terms, P postings (one for each document and each different word in it); n, v, p the same of one block, and m its tokens.
Papers: Robertson & Zaragoza 2009 (BM25); Kamphuis et al. 2020 (Lucene's variant); Lù 2024 (eager scores).
"""
import json
import os
import re
import unicodedata
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

# ---------------------------------------------------------------------------------------------------------- words
# \w knows letters and digits, but not the marks on or around them (accents, vowel signs): here those of Unicode's first plane, all but rare scripts'.
MARKS = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M")
WORD = re.compile(rf"\w+(?:[{MARKS}]+\w*)*")
# Han, Hiragana and Katakana are written without spaces (the punctuation between them is no WORD anyway).
CJK = re.compile("([\u3005-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")
ASCII = {c: chr(c).lower() if WORD.match(chr(c)) else " " for c in range(128)}
TOKENIZER = f"tokenizer 1, Unicode {unicodedata.unidata_version}"  # an index fits only the words that it was made of


def tokenize(text: str) -> list[str]:
    """The words of a document or of a query: one function for both sides.

    NFKC and lower case; runs of letters, digits and "_" with their marks; each Han, Hiragana or Katakana character by itself. Korean words are
    split at spaces only, as are those of scripts without spaces (Thai, Lao, Khmer). Nothing is stemmed and no word is left out.
    """
    if text.isascii():                                             # the same words in half the time
        return text.translate(ASCII).split()
    return WORD.findall(CJK.sub(r" \1 ", unicodedata.normalize("NFKC", text).lower()))


# ----------------------------------------------------------------------------------------------------------- BM25
def idf(N: int, df):
    """C4, inverse document frequency: ln(1 + (N - df + 0.5) / (df + 0.5)), above 0 even for a word in every document."""
    return np.log(1 + (N - df + 0.5) / (df + 0.5))


def tf_part(tf, dl, avgdl: float, k1: float, b: float):
    """C4, saturated term frequency: tf / (tf + k1 (1 - b + b dl / avgdl)), without the constant factor k1 + 1."""
    return tf / (tf + k1 * (1 - b + b * dl / avgdl))


def reached(scores, k: int) -> float:
    """A score that at least k of scores [N] reach; close to the k-th best, and cheaper: the k-th best of the maxima of N // 64 columns."""
    columns = scores[:len(scores) // 64 * 64].reshape(64, -1)
    return float(np.partition(columns.max(0), -k)[-k]) if k <= columns.shape[1] else 0.0


def top_k(scores, k: int):
    """scores [N] -> the indices of the k best above 0: score descending, then index ascending; so every top-k is the head of the top-(k+1)."""
    floor = reached(scores, k)
    hits = np.flatnonzero(scores >= floor if floor > 0 else scores > 0)      # [hits], index ascending
    if k < len(hits):                                              # keep all that tie with the k-th, then sort only these
        hits = hits[scores[hits] >= np.partition(scores[hits], -k)[-k]]
    return hits[np.argsort(-scores[hits], kind="stable")[:k]]      # [<= k]


def sort_block(terms: list[int], lengths, first: int) -> tuple[np.ndarray, ...]:
    """Postings of n documents, numbered from `first` on, that hold lengths [n] of the tokens terms [m].

    -> words [v] ascending; starts [v + 1]: words[i] owns postings starts[i] : starts[i + 1]; docs [p], ascending for each word; tf [p].
    A posting takes six bytes (eight if a word stands more than 65,535 times in one document).
    """
    # One number for each token, term and document: sorting and counting these gives the postings by term.
    cells = np.array(terms, np.int64) << 32 | np.repeat(np.arange(first, first + len(lengths)), lengths)      # [m]
    cells, tf = np.unique(cells, return_counts=True)               # [p], [p]
    term = cells >> 32                                             # [p]
    starts = np.flatnonzero(np.diff(term, prepend=-1, append=-2))  # [v + 1]
    small = tf.max(initial=0) < 2 ** 16
    return term[starts[:-1]], starts, cells.astype(np.int32), tf.astype(np.uint16 if small else np.int32)


def read_blocks(texts: Iterable[str], size: int, folder: Path | None) -> tuple[dict, np.ndarray, list]:
    """One pass over the texts -> vocabulary (word -> term number, in order of appearance), lengths [N], blocks.

    A block closes once it holds `size` tokens. It is what sort_block returned, or the files in `folder` that hold that.
    """
    vocabulary = defaultdict()
    vocabulary.default_factory = vocabulary.__len__
    terms, lengths, blocks, first = [], array("i"), [], 0          # [m], [N]

    def close_block():
        """Sort what has gathered, and keep it or write it out."""
        block = sort_block(terms, lengths[first:], first)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            files = [folder / f"block{len(blocks)}-{name}.npy" for name in ("words", "starts", "docs", "tf")]
            for file, values in zip(files, block):
                np.save(file, values)
            block = files
        blocks.append(block)

    for text in texts:
        tokens = tokenize(text)
        terms += map(vocabulary.__getitem__, tokens)
        lengths.append(len(tokens))
        if len(terms) >= size:
            close_block()
            terms, first = [], len(lengths)
    close_block()
    vocabulary.default_factory = None                              # from here on an unknown word is an unknown word
    return vocabulary, np.array(lengths), blocks


def opened(block) -> tuple[np.ndarray, ...]:
    """words, starts, docs, tf of a block; its files are mapped anew each time, so that what was read can be let go."""
    return tuple(np.load(part, mmap_mode="r") if isinstance(part, Path) else part for part in block)


def merge_blocks(blocks: list, indptr, size: int) -> Iterator[tuple]:
    """The postings of all blocks by term -> (t0, t1, docs, tf), those of terms t0 : t1, range after range, of `size` postings at most or one term."""
    t0, V = 0, len(indptr) - 1
    while t0 < V:
        t1 = max(t0 + 1, int(np.searchsorted(indptr, indptr[t0] + size, "right")) - 1)
        free = indptr[t0:t1] - indptr[t0]                          # [t1 - t0]: where the next posting of each term goes
        docs, tf = np.empty((2, indptr[t1] - indptr[t0]), np.int32)
        for words, starts, block_docs, block_tf in map(opened, blocks):
            i, j = np.searchsorted(words, (t0, t1))                # words i : j of the block are in the range
            terms, counts, part = words[i:j] - t0, np.diff(starts[i:j + 1]), slice(starts[i], starts[j])
            to = np.repeat(free[terms] - starts[i:j], counts) + np.arange(part.start, part.stop)
            docs[to], tf[to] = block_docs[part], block_tf[part]
            free[terms] += counts
        yield t0, t1, docs, tf
        t0 = t1


class BM25:
    """score(q, d) = sum over the words t of q of idf(t) * tf_part(t, d), a word that stands twice in q counting twice.

    Empty documents count in N and in the average length avgdl. `texts` is read once, in order, in blocks of `block` tokens; no score depends
    on that size. folder: build the index there, holding one block in memory (and the vocabulary, and eight bytes a document); it needs 14
    bytes of disk a posting, of which 8 stay.
    """
    ARRAYS = ("indptr", "docs", "scores")
    VOCABULARY = "vocabulary.json"
    LONG = 2 ** 17                                                 # postings of frequent words in a query that are worth to be left out

    def __init__(self, texts: Iterable[str], k1: float = 1.5, b: float = 0.75, folder=None, block: int = 2 ** 23):
        if k1 < 0 or not 0 <= b <= 1:
            raise ValueError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, not k1={k1}, b={b}.")
        folder = None if folder is None else Path(folder)
        self.vocabulary, dl, blocks = read_blocks(texts, block, folder)      # dl [N]
        self.N, avgdl = len(dl), dl.sum() / max(len(dl), 1)
        df = np.zeros(len(self.vocabulary), np.int64)              # [V]
        for words, starts, *_ in map(opened, blocks):
            df[words] += np.diff(starts)
        self.indptr = np.concatenate(([0], np.cumsum(df)))         # [V + 1]: term t owns postings indptr[t] : indptr[t+1]
        weights = idf(self.N, df)                                  # [V]

        def scored() -> Iterator[tuple]:                           # docs and scores of a range of terms, range after range
            with tqdm(total=int(self.indptr[-1]), desc="Index", unit=" postings", unit_scale=True, disable=folder is None) as bar:
                for t0, t1, docs, tf in merge_blocks(blocks, self.indptr, block):
                    weight = np.repeat(weights[t0:t1], df[t0:t1])
                    yield docs, (weight * tf_part(tf, dl[docs], avgdl, k1, b)).astype(np.float32)
                    bar.update(len(docs))

        if folder is None:
            self.docs, self.scores = np.empty(self.indptr[-1], np.int32), np.empty(self.indptr[-1], np.float32)    # [P]
            end = 0
            for docs, scores in scored():
                start, end = end, end + len(docs)
                self.docs[start:end], self.scores[start:end] = docs, scores
        else:
            self.write(folder, scored())
            self.map(folder)
            for file in chain(*blocks):
                file.unlink()

    def search(self, query: str, k: int = 5) -> list[tuple[int, float]]:
        """The k best (document index, score) with score > 0, best first, ties by lower index."""
        if k < 1:
            raise ValueError(f"k is {k}: a search must ask for at least 1 document.")
        indptr, docs, values = map(np.asarray, (self.indptr, self.docs, self.scores))     # slices of a memmap cost more
        terms = [self.vocabulary[token] for token in tokenize(query) if token in self.vocabulary]
        rows = [(docs[indptr[t]:indptr[t + 1]], values[indptr[t]:indptr[t + 1]]) for t in terms]
        found = self.contenders(rows, k)
        scores = np.zeros(self.N if found is None else len(found), np.float32)
        for docs, values in rows:
            if found is None:
                np.add.at(scores, docs, values)
            else:                                                  # the same sums in the same order, of those documents only
                at = np.minimum(docs.searchsorted(found), len(docs) - 1)
                scores += np.where(docs[at] == found, values[at], np.float32(0))
        return [(int(i if found is None else found[i]), float(scores[i])) for i in top_k(scores, k)]

    def contenders(self, rows: list[tuple], k: int) -> np.ndarray | None:
        """Documents, ascending, that the k best are among, if the query's rarer words alone tell so; else None: all. (Speed only.)

        A word in more than a quarter of the documents has a long row, and brings none of them more than its idf: who is behind the k-th best
        by more than all such words together stays behind (MaxScore, Turtle & Flood 1995).
        """
        df = np.array([len(docs) for docs, _ in rows])
        often = df > self.N / 4
        if df[often].sum() <= self.LONG:
            return None
        scores, rest = np.zeros(self.N, np.float32), idf(self.N, df[often]).sum()
        for j in np.flatnonzero(~often):
            np.add.at(scores, *rows[j])
        floor = reached(scores, k) * (1 - 1e-6 * len(rows)) - rest           # less by more than float32 sums may be off
        if floor <= 0 or 64 * np.count_nonzero(scores >= floor) > df[often].sum():      # looking up costs more than adding
            return None
        return np.flatnonzero(scores >= floor).astype(np.int32)

    def save(self, folder) -> None:
        """Write three .npy arrays and, last, the vocabulary: without it a folder is an unfinished save and does not load."""
        self.write(folder, [(self.docs, self.scores)])

    def write(self, folder, rows: Iterable[tuple]) -> None:
        """save(), with docs and scores in as many parts as they come."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.VOCABULARY).unlink(missing_ok=True)
        parts = [folder / f"{name}.part.npy" for name in self.ARRAYS]      # replaced, not overwritten: self may map the old
        np.save(parts[0], self.indptr)
        with open(parts[1], "wb") as docs, open(parts[2], "wb") as scores:
            for file, dtype in ((docs, np.int32), (scores, np.float32)):
                header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (int(self.indptr[-1]),)}
                np.lib.format.write_array_header_1_0(file, header)
            for row in rows:
                docs.write(row[0]), scores.write(row[1])
        for name, part in zip(self.ARRAYS, parts):
            os.replace(part, folder / f"{name}.npy")
        (folder / self.VOCABULARY).write_text(json.dumps({"documents": self.N, "terms": list(self.vocabulary)}))

    def map(self, folder: Path) -> None:
        for name in self.ARRAYS:
            setattr(self, name, np.load(folder / f"{name}.npy", mmap_mode="r"))

    @classmethod
    def load(cls, folder) -> "BM25":
        """The index that save() wrote, with equal results; its arrays stay on disk, memory-mapped."""
        index, folder = cls.__new__(cls), Path(folder)
        try:
            saved = json.loads((folder / cls.VOCABULARY).read_text())
            index.N, index.vocabulary = saved["documents"], {term: t for t, term in enumerate(saved["terms"])}
            index.map(folder)
            if not (len(index.indptr) == len(index.vocabulary) + 1 and index.indptr[-1] == len(index.docs) == len(index.scores)):
                raise ValueError
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"There is no whole BM25 index in {folder}: {Path(error.filename).name} is missing; "
                                    "build the index and save() it there.") from None
        except (ValueError, TypeError, KeyError, EOFError):        # what broken JSON and broken .npy files raise
            raise ValueError(f"The BM25 index in {folder} is damaged: build it again and save() it there.") from None
        return index


# ---------------------------------------------------------------------------------------------------------- tools
def title_and_text(document, i: int) -> tuple[str, str]:
    """Of document i, checked where it is read, so that a large corpus need not be read through to be used."""
    if not (isinstance(document, dict) and isinstance(document.get("title"), str) and isinstance(document.get("text"), str)):
        raise ValueError(f"Document {i} must be a dict with a string 'title' and a string 'text', not {document!r:.80}.")
    return document["title"], document["text"]


def texts_of(documents) -> Iterator[str]:
    """What is indexed: of each document the title and the text."""
    return (" ".join(title_and_text(document, i)) for i, document in enumerate(documents))


def identifier(document) -> str:
    return "" if document.get("id") is None else str(document["id"])


def fold(name: str) -> str:
    """A name as it is looked up when it is not found as written: case ignored, white space joined."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def hashed(name: str) -> int:
    """Folded names that are equal have equal numbers, and a few others too: 32 bits, set above 32 for a document's number."""
    return zlib.crc32(fold(name).encode("utf-8", "surrogatepass")) << 32


def name_entries(document, i: int) -> tuple[int, int]:
    """What stands in the table of names for document i: its title and its id, hashed, each with i in the low 32 bits."""
    return hashed(title_and_text(document, i)[0]) | i, hashed(identifier(document)) | i


class Retriever:
    """The agent's two tools over a list of documents {"id", "title", "text"}; "id" may be missing.

    max_doc_chars: of each document's text in a search result. page_chars, max_pages: of a document read by access.
    index: a BM25 over texts_of(documents), these very documents (a loaded one, say); it is built here if not given.
    names: all their name_entries, ascending; made at the first access if not given: not every question needs them.
    """

    def __init__(self, documents, max_doc_chars: int = 5000, page_chars: int = 25000, max_pages: int = 10,
                 index: BM25 | None = None, names: np.ndarray | None = None):
        if min(max_doc_chars, page_chars, max_pages) < 1:
            raise ValueError(f"{max_doc_chars=}, {page_chars=} and {max_pages=} must each be at least 1.")
        self.documents = documents
        self.max_doc_chars, self.page_chars, self.max_pages = max_doc_chars, page_chars, max_pages
        self.index = index or BM25(texts_of(documents))
        if self.index.N != len(documents):
            raise ValueError(f"The index holds {self.index.N} documents, but {len(documents)} were given: build it from these documents.")
        if names is not None:
            self.names = names

    def search(self, query: str, k: int = 5) -> str:
        """What goes inside <information>: the k best documents, numbered, each cut by itself, or a sentence that there is none."""
        found, cut = (title_and_text(self.documents[i], i) for i, _ in self.index.search(query, k)), self.max_doc_chars
        results = (f"[{rank}] {title[:cut]}: {text[:cut]}" for rank, (title, text) in enumerate(found, 1))
        return "\n".join(results) or f'No results for "{query.strip()}".'

    @cached_property
    def names(self) -> np.ndarray:
        entries = (name_entries(document, i) for i, document in enumerate(self.documents))
        return np.sort(np.fromiter(chain.from_iterable(entries), np.uint64))

    def find(self, name: str) -> int | None:
        """The document of this title, else of this id, else the same with case and white space ignored: each time the first."""
        names, low, folded = np.asarray(self.names), hashed(name), fold(name)
        start, end = names.searchsorted(np.uint64(low)), names.searchsorted(np.uint64(low | 0xFFFFFFFF), "right")
        best, rank_of_best = None, 4
        for i in (names[start:end] & np.uint64(0xFFFFFFFF)).tolist():      # ascending: those that may be meant, and are asked themselves
            title, ident = title_and_text(self.documents[i], i)[0], identifier(self.documents[i])
            rank = (title == name, ident == name, fold(title) == folded, fold(ident) == folded, True).index(True)
            if rank < rank_of_best:
                best, rank_of_best = i, rank
            if rank == 0:
                break
        return best

    def access(self, name: str) -> list[str]:
        """The pages of the document with this title or id; [] if there is none.

        Of several documents with one title the first in the corpus is read, and the others by their ids. One without text has one page: its title.
        """
        if not name.strip() or (i := self.find(name)) is None:
            return []
        title, text = title_and_text(self.documents[i], i)
        text = text if text.strip() else title
        starts = range(0, min(max(len(text), 1), self.max_pages * self.page_chars), self.page_chars)
        return [text[start:start + self.page_chars] for start in starts]
