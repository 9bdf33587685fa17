"""A corpus as people have it: a file of passages, up to the size of Wikipedia, and its saved index.

    retriever = load_corpus("wiki-18.jsonl")                   # minutes the first time, then seconds

A large JSONL stays in its file, where documents are read when they are asked for, and so does its index (retriever.BM25): both are
memory-mapped, and only the vocabulary is held in memory.
"""
import codecs
import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
from tqdm import tqdm

from retriever import BM25, TOKENIZER, Retriever, name_entries, texts_of

LARGE = 2 ** 22                                                # bytes of a corpus file, some thousand passages: above it the index is saved
CACHE = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "mempo-lastkv")


FOREIGN = {  # what a file starts with -> what it is and what to do; {0} is its name, {1} the JSONL to be made of it
    b"PAR1": 'a Parquet file; make JSONL of it once: pip install pandas pyarrow && python -c "import pandas; '
             'pandas.read_parquet(\'{0}\').to_json(\'{1}\', orient=\'records\', lines=True)"',
    b"\x1f\x8b": "compressed (gzip); unpack it first: gunzip -k {0}", b"BZh": "compressed (bzip2); unpack it first: bunzip2 -k {0}",
    b"\xfd7zXZ": "compressed (xz); unpack it first: unxz -k {0}", b"\x28\xb5\x2f\xfd": "compressed (zstd); unpack it first: unzstd {0}",
    b"PK\x03\x04": "a zip archive; unpack it first: unzip {0}",
    b"version https://git-lfs": "a Git LFS pointer, not the data; fetch that: git lfs pull",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8", b"\xfe\xff": "UTF-16 text; save it as UTF-8"}


def text_start(path, kind: str) -> bytes:
    """The first bytes of a file's text. Raises ValueError, with what to do, for what holds no JSON."""
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; give one of its files")
    if not Path(path).is_file():
        raise ValueError(f"there is no {kind} file {path}")
    with open(path, "rb") as file:
        start = file.read(4096)
        for magic, words in FOREIGN.items():
            if start.startswith(magic):
                raise ValueError(f"{path} is {words.format(path, Path(path).with_suffix('.jsonl'))}")
        text = start.removeprefix(b"\xef\xbb\xbf").lstrip()   # a byte-order mark
        while start and not text:
            start = file.read(4096)
            text = start.lstrip()
    if not text:
        raise ValueError(f"{path} is empty; its download or copy failed, so fetch it again")
    if text.startswith(b"<"):
        raise ValueError(f"{path} is a web page (HTML), not the data that it may link to; download the file itself")
    return text


def utf8(raw: bytes, path, line: int = 0) -> str:
    """The text without a byte-order mark. Raises ValueError with the line: the given one, or counted."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = line or raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}); save the file as UTF-8, or download it again") from None


def corpus_document(row, i: int) -> dict:
    """{"id", "title", "text"} of a row with these keys, or with "contents": a first line with the title, in quotes or not, then the text
    (or the text only). A missing id is the number of the document, from 1 on."""
    row = row if isinstance(row, dict) else {}
    title, text = row.get("title"), row.get("text")
    if text is None and isinstance(row.get("contents"), str):
        first, newline, rest = row["contents"].partition("\n")
        first, text = (first.strip(), rest) if newline else ("", first)
        quoted = len(first) > 1 and first[0] == first[-1] == '"'
        first = first[1:-1] if quoted else first
        if isinstance(title, str) and title != first and not quoted:      # a first line that is no title is text
            text = row["contents"]
        title = title if isinstance(title, str) else first
    if not isinstance(title, str) or not isinstance(text, str):
        raise ValueError('a document needs a "title" and a "text", or "contents"')
    return {"id": str(next((row[key] for key in ("id", "_id") if row.get(key) is not None), i + 1)), "title": title, "text": text}


def file_bar(path, what: str) -> tqdm:
    """A bar over the bytes of a file, with the time left; none for what takes no second."""
    return tqdm(total=Path(path).stat().st_size, desc=f"{what} {Path(path).name}", unit="B", unit_scale=True, delay=1)


def corpus_lines(path) -> Iterator[tuple[int, bytes]]:
    """(where it begins, the line) of each line that is not blank; a byte-order mark is passed over."""
    with open(path, "rb") as file:
        start = 3 if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(start)
        for line in file:
            if line.strip():
                yield start, line
            start += len(line)


class JsonLines:
    """The documents of a JSONL file, each read from it when it is asked for. starts [N]: the first byte of each one's line.

    Nothing but `starts` is in memory, or memory-mapped if it is given so. A bad line raises ValueError with file and line when it is read.
    """
    def __init__(self, path, starts=None):
        self.path, self.starts = path, starts
        if starts is None:
            self.starts = array("q")
            with file_bar(path, "Finding the lines of") as bar:
                for start, line in corpus_lines(path):
                    self.starts.append(start)
                    bar.update(len(line))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict:
        with open(self.path, "rb") as file:                    # opened each time: threads and forks share no position in it
            file.seek(self.starts[i])
            return self.parse(i, file.readline())

    def __iter__(self) -> Iterator[dict]:
        return (self.parse(i, line) for i, (_, line) in enumerate(corpus_lines(self.path)))

    def parse(self, i: int, line: bytes) -> dict:
        """Document i from its line; ValueError, with file and line number, if it is none."""
        try:
            return corpus_document(json.loads(line.decode("utf-8-sig")), i)
        except (ValueError, RecursionError) as error:
            what = f"not valid JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else error
            with open(self.path, "rb") as file:
                number = next(n for n, end in enumerate(accumulate(map(len, file)), 1) if end > self.starts[i])
            raise ValueError(f"{self.path}, line {number}: {what}; mend or delete the line") from None


def is_json_lines(path) -> bool:
    """One object a line, and not one object in all: another line opens one, or the first has the keys of a document."""
    lines = (line.lstrip() for _, line in corpus_lines(path))
    first, second = next(lines, b""), next(lines, b"")
    if first[:1] == b"[" or second[:1] == b"{":
        return first[:1] != b"["
    try:
        return not {"id", "title", "text", "contents"}.isdisjoint(json.loads(first))
    except (ValueError, TypeError, RecursionError):
        return first[:1] != b"{"


def read_titles(path) -> list[dict]:
    """Documents of one JSON object {title: text or [sentence, ...]}, HotpotQA's form; a title that stands twice is two documents."""
    try:
        pairs = json.loads(utf8(Path(path).read_bytes(), path), object_pairs_hook=list)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}); mend it or download it again") from None
    except RecursionError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); mend it or download it again") from None
    documents = []
    for number, pair in enumerate(pairs, 1):
        title, text = pair if isinstance(pair, tuple) else (None, None)
        text = [text] if isinstance(text, str) else text
        if not isinstance(text, list) or not all(isinstance(sentence, str) for sentence in text):
            raise ValueError(f"{path}, entry {number}: a title with its text or its list of sentences is needed; or give one object a line")
        documents.append({"id": str(number), "title": title, "text": "".join(text)})
    return documents


def read_corpus(path, starts=None) -> list[dict] | JsonLines:
    """The documents {"id", "title", "text"} of a corpus file: JSONL, or one object {title: text or [sentence, ...]}, told apart by content.

    JSONL above LARGE bytes stays in its file (starts: as in JsonLines). Of several documents with one id, access opens the first.
    """
    text_start(path, "corpus")                                 # refuses what is no text
    documents = JsonLines(path, starts) if is_json_lines(path) else read_titles(path)
    if not len(documents):
        raise ValueError(f"{path} holds no document")
    return list(documents) if Path(path).stat().st_size <= LARGE else documents


def fingerprint(path, *settings) -> str:
    """A hash of the whole content of a file and of the settings that its index depends on."""
    size, piece = Path(path).stat().st_size, 2 ** 24

    def digest(start: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(piece)).digest()

    with ThreadPoolExecutor(8) as pool, file_bar(path, "Reading") as bar:    # hashing and reading leave Python's lock alone
        pieces = []
        for piece_digest in pool.map(digest, range(0, size, piece)):
            pieces.append(piece_digest)
            bar.update(min(piece, size - bar.n))
    return hashlib.sha256(repr((size, settings, pieces)).encode()).hexdigest()[:32]


def open_index(path, folder: Path, **sizes: int) -> Retriever:
    """The retriever over what build_index saved in `folder`, memory-mapped. Raises OSError, EOFError or ValueError if it is not there or damaged."""
    starts, names = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("starts", "names"))
    retriever = Retriever(read_corpus(path, starts), index=BM25.load(folder), names=names, **sizes)
    if len(names) != 2 * len(retriever.documents):
        raise ValueError(f"the index in {folder} is damaged")
    return retriever


def build_index(path, folder: Path, k1: float, b: float) -> None:
    """Index a corpus file in `folder`, under another name until it is whole: no process takes a part of it for all."""
    for left in folder.parent.glob("building-*"):              # by a process that was killed: no build takes a day
        if time.time() - left.stat().st_mtime > 86400:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        unfinished, documents, names = Path(temporary) / folder.name, read_corpus(path), array("Q")

        def named() -> Iterator[dict]:
            for i, document in enumerate(tqdm(documents, f"Indexing {Path(path).name}", unit=" documents", unit_scale=True)):
                names.extend(name_entries(document, i))
                yield document

        BM25(texts_of(named()), k1, b, unfinished)
        np.save(unfinished / "starts.npy", np.array(getattr(documents, "starts", []), np.int64))
        np.save(unfinished / "names.npy", np.sort(names))
        for file in unfinished.iterdir():                      # on the disk before it bears its name, should the power fail
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():                            # else another process was faster, and its index is the same
                raise


def load_corpus(path, k1: float = 1.5, b: float = 0.75, **sizes: int) -> Retriever:
    """A retriever, with the given sizes (max_doc_chars, page_chars, max_pages), over a corpus file. The index of a large one is saved in
    PATH.index, or else in the user's cache, and found again by the hash of the whole file and the settings.

    What an interrupted build left is never used; an index with a file missing or cut off is built again; of two processes that build at
    once the first to end is kept. An index may be deleted at any time.
    """
    if not Path(path).is_file() or Path(path).stat().st_size <= LARGE:
        documents = read_corpus(path)
        return Retriever(documents, index=BM25(texts_of(documents), k1, b), **sizes)
    homes, name = (Path(f"{path}.index"), CACHE), fingerprint(path, TOKENIZER, k1, b)
    for home in homes:
        try:
            return open_index(path, home / name, **sizes)
        except (FileNotFoundError, EOFError, ValueError):      # none, or a damaged one
            shutil.rmtree(home / name, ignore_errors=True)
        except OSError:                                        # one that may not be read
            pass
    for home in homes:
        try:
            home.mkdir(parents=True, exist_ok=True)
            build_index(path, home / name, k1, b)
            return open_index(path, home / name, **sizes)
        except OSError as error:
            problem = error
    raise ValueError(f"the index of {path} can be written neither to {homes[0]} nor to {homes[1]} ({problem}); "
                     "make room there for about twice the size of the corpus")
