"""Where documents come from: the Python standard library, local files, any dataset on the hub.

A corpus is an ordered list of files and a rule that turns each into documents, so that everybody who names
the same corpus reads the same documents in the same order. Empty documents, records whose text is null, and
documents equal to an earlier one are skipped (hub corpora come deduplicated); lone surrogates and invalid
bytes inside records become U+FFFD. In `python` a file that is not UTF-8 is skipped. A file that cannot be
read to its end is an error that names it.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import sysconfig
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nanomuon.documents import (
    RECORD_SUFFIXES,
    SUFFIXES,
    BadFileError,
    NotUTF8Error,
    cut,
    read_records,
)
from nanomuon.files import read_json, write_json
from nanomuon.runtime import InputError, base_dir, print0

PRESETS = {
    "climbmix": "hf:karpathy/climbmix-400b-shuffle",
    "fineweb-edu": "hf:HuggingFaceFW/fineweb-edu:sample-10BT",
}
HUB_SUFFIXES = (".txt", *RECORD_SUFFIXES, ".json", ".json.gz", ".json.zst")  # .json: lines, as is usual there
PIECE_BYTES = 4096  # into which with_both_parts() cuts the documents of other corpora


def is_validation(text: str) -> bool:
    """The split of every corpus: one document in 20, by its own hash, so that it never moves."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 20 == 0


@dataclass(frozen=True)
class Corpus:
    """A named, ordered set of documents. `slug` names its folders, `revision` pins its content."""

    name: str
    revision: str
    slug: str
    files: tuple  # of Path; of names inside the repository `repo` for a corpus on the hub
    text_field: str = "text"
    repo: str | None = None
    piece_bytes: int | None = None  # documents are cut into pieces of so many bytes: with_both_parts()

    @property
    def needs_download(self) -> bool:
        """Whether reading the corpus may have to fetch files from the hub."""
        return self.repo is not None

    def documents(self):
        """Yield all documents, str, in their fixed order."""
        seen = set()
        for number in range(len(self.files)):
            yield from self.read(number, seen)

    def read(self, number: int, seen: set):
        """Yield the documents of one file; InputError if it is bad. seen: digests of the documents so far."""
        is_book = len(self.files) == 1 and self.piece_bytes is None
        try:
            for record in read_records(self._fetch(number), self.text_field, is_book):
                if record:
                    yield from self._documents_of(record, seen)
        except NotUTF8Error as error:
            if self.name != "python":
                raise self._bad_file(error) from error
        except BadFileError as error:
            raise self._bad_file(error) from error

    def _documents_of(self, record, seen):
        """Yield a record whole, or in pieces, but for those that were there before."""
        record = record.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # no lone surrogates
        for text in [record] if self.piece_bytes is None else cut(record, self.piece_bytes):
            if not self.needs_download:
                digest = hashlib.sha256(text.encode()).digest()
                if digest in seen:
                    continue
                seen.add(digest)
            yield text

    def _bad_file(self, error):
        advice = "repair it, or move it out of the folder"
        if self.needs_download:
            advice = "what is damaged is fetched again once it is deleted"
        return InputError(f"bad file in corpus {self.name}: {error}; {advice}")

    def _fetch(self, number) -> Path:
        """The file on this machine. The next one is fetched meanwhile."""
        if not self.needs_download:
            return self.files[number]
        path = self._download(number)
        if number + 1 < len(self.files):
            threading.Thread(target=self._download_ahead, args=(number + 1,), daemon=True).start()
        return path

    def _download_ahead(self, number):
        with contextlib.suppress(Exception):  # who asks for the file itself will hear of it
            self._download(number)

    def _download(self, number):
        from huggingface_hub import hf_hub_download

        cache = base_dir() / "corpus" / "hub"
        with _of_the_hub(f"fetching {self.files[number]} of {self.repo}"):
            # Tries again by itself, resumes a partial file, checks size and, if the hub knows it, hash
            return Path(
                hf_hub_download(
                    self.repo,
                    self.files[number],
                    repo_type="dataset",
                    revision=self.revision,
                    cache_dir=cache,
                )
            )


def with_both_parts(corpus: Corpus) -> Corpus:
    """The corpus if some documents are for training and some for validation, else the same in pieces.

    That it is cut is printed. Reads until it has seen both parts: some twenty documents, or all if there are
    few. InputError if there is no text, and if not even the pieces make both parts.
    """
    number, lacking = _missing_part(corpus)
    if lacking is None:
        return corpus
    if not number:
        raise InputError(f"corpus {corpus.name} has 0 documents: no text in {len(corpus.files)} files")
    documents = f"corpus {corpus.name} has {number} documents and none for {lacking}"
    pieces = f"pieces of {PIECE_BYTES:,} bytes at line ends"
    in_pieces = replace(corpus, piece_bytes=PIECE_BYTES)
    number, lacking = _missing_part(in_pieces)
    if lacking is not None:
        raise InputError(
            f"{documents}; cut into {pieces} it has {number}, and none for {lacking} "
            "(one in 20 is for validation, by its hash): add text"
        )
    print0(f"{documents}: all are cut into {pieces}, and the pieces are its documents")
    return in_pieces


def _missing_part(corpus):
    """(documents that were read, "training" or "validation" if none of them is for that, else None)."""
    number, found = 0, set()
    for number, text in enumerate(corpus.documents(), 1):  # noqa: B007
        found.add(is_validation(text))
        if len(found) == 2:
            return number, None
    return number, "training" if True in found else "validation"


def open_corpus(name: str, text_field: str | None = None) -> Corpus:
    """The corpus called `name`; InputError where there is none.

    python          the standard library of the running interpreter: about 30 MB, no download
    path:PLACE      a text file (prose, markup, source code), .jsonl, .jsonl.gz, .jsonl.zst or .parquet, or a
                    folder of them (sorted)
    hf:ORG/NAME     the train split of a dataset on the hub; hf:ORG/NAME:CONFIG@REVISION names more. The
                    revision is pinned when the corpus is first opened; later the hub is asked for missing
                    files only
    climbmix, fineweb-edu   short for the two web corpora that speedruns use

    Records take their text from `text_field` (default "text"); a.b is field b of the record in field a. It is
    remembered for later commands that name the same corpus. A text file is one document; a corpus of a single
    text file is cut at line ends every 4 KB.
    """
    name = PRESETS.get(name, name)
    check_corpus(name)
    if name == "python":
        return _python_corpus()
    if name.startswith("path:"):
        return _path_corpus(name, text_field)
    return _hub_corpus(name, text_field)


def check_corpus(name: str) -> None:
    """InputError where there cannot be a corpus of this name. Quick: nothing is read, and no hub is asked."""
    name = PRESETS.get(name, name)
    _check_utf8(name)
    if name.startswith("path:"):
        _place_of(name)
    elif name.startswith("hf:"):
        if not re.match(r"hf:[^:@]", name):
            raise InputError(f"corpus {name} names no dataset, hf:ORG/NAME[:CONFIG][@REVISION] does")
    elif name != "python":
        known = ", ".join(["python", "path:FILE_OR_FOLDER", "hf:ORG/NAME[:CONFIG]", *PRESETS])
        raise InputError(f"unknown corpus {name!r}: use one of {known}")


def _python_corpus() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__"}
    files = []
    for path in sorted(root.rglob("*.py")):
        if not outside & set(path.relative_to(root).parts):
            files.append(path)
    revision, digest = _fingerprint("python", root, files, text_field=None)
    return Corpus("python", f"{platform.python_version()}-{revision}", f"python-{digest}", tuple(files))


def _check_utf8(name):
    """InputError where the name of a corpus could be neither printed nor written to a report."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the name of corpus {name!a} is not UTF-8: rename the place") from error


def _place_of(name) -> Path:
    """The file or folder of a path: corpus; InputError where there is none."""
    place = name.removeprefix("path:")
    if not place:
        raise InputError("corpus path: names no place, path:FILE_OR_FOLDER does")
    try:
        root = Path(place).expanduser().resolve()
        is_there = root.is_file() or root.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long, no permission, links in a circle
        raise InputError(f"corpus {name}: {getattr(error, 'strerror', None) or error}") from error
    if not is_there:
        raise InputError(f"corpus {name}: no such file or folder")
    return root


def _path_corpus(name, text_field) -> Corpus:
    root = _place_of(name)
    name = f"path:{root}"
    _check_utf8(name)
    files = list_files(root)
    if not files:
        raise InputError(
            f"corpus {name} has no file with text: {', '.join(RECORD_SUFFIXES)}, prose and source code "
            "(.txt, .md, .rst, .py, .c and so on) are read"
        )
    text_field = _recall(name, text_field=text_field).text_field or "text"
    revision, digest = _fingerprint(name, root, files, text_field)
    slug = f"path-{_readable(root.name)}-"
    return Corpus(name, revision, slug + digest, tuple(files), text_field)


def list_files(root: Path) -> list[Path]:
    """The files of a place that are read, by their suffix, sorted. InputError for an unreadable folder.

    Hidden files and folders are left out, links to folders, which might lead round in circles, and
    base_dir(), which changes with every run.
    """

    def refuse(error):
        raise InputError(f"{error.filename}: {error.strerror}; make it readable, or move it away")

    if root.is_file():
        return [root] if root.name.lower().endswith(SUFFIXES) else []
    ours = base_dir().resolve()
    files = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        for name in list(subfolders):
            if name.startswith(".") or Path(folder, name) == ours:
                subfolders.remove(name)  # os.walk goes into those that stay
        for name in names:
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                files.append(Path(folder, name))
    return sorted(files)


def _hub_corpus(name, text_field) -> Corpus:
    remembered = _recall(name, text_field=text_field)
    if not remembered.repo:  # a folder may have changed since
        remembered = _recall(name, **_resolve(name))
    text_field = remembered.text_field or "text"
    files = tuple(remembered.files if remembered.repo else map(Path, remembered.files))
    digest = _digest([remembered.revision, text_field])
    slug = f"{_readable(name.replace(':', '-'))}-{digest[:8]}"
    return Corpus(name, remembered.revision, slug, files, text_field, remembered.repo)


def _resolve(name: str) -> dict:
    """The revision and the files of a dataset. A folder stands for a dataset, as it does in `datasets`."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    path, _, revision = name.removeprefix("hf:").partition("@")
    path, _, config = path.partition(":")
    on_hub = not Path(path).is_dir()
    sha = None
    with _of_the_hub(f"opening {name}"):
        if on_hub:
            # Fails at once if there is no network; the builder alone would try for half a minute
            sha = HfApi().dataset_info(path, revision=revision or None, timeout=10).sha
        cache = str(base_dir() / "corpus" / "hub")
        builder = load_dataset_builder(path, config or None, revision=sha, cache_dir=cache)
    revision, files = sha or builder.hash, builder.config.data_files or {}
    if "train" not in files:
        raise InputError(f"corpus {name} has no train split (it has: {', '.join(files) or 'no data files'})")
    files = [file.split(f"@{revision}/", 1)[-1] for file in files["train"]]
    for file in files:
        if not file.lower().endswith(HUB_SUFFIXES):
            raise InputError(f"corpus {name} holds {file}, which is none of {', '.join(HUB_SUFFIXES)}")
    return {"revision": revision, "repo": path if on_hub else None, "files": files}


@contextlib.contextmanager
def _of_the_hub(what: str):
    """Errors in here are one line. The clients of the hub raise their own kinds, httpx's and OSErrors."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{what} failed: {reason}. Check name and network; offline, CORPUS=python bash speedrun.sh works"
        ) from error


def _fingerprint(name, root, files, text_field):
    """(16, 8) hex digits that stand for the content of local files and for how they are read.

    Made of names, sizes and times: hashing 100 GB at every start would not be worth the certainty.
    """
    listing = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; repair it, or move it out of the folder") from error
        listing.append((path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    digest = _digest([name, listing, text_field])
    return digest[:16], digest[:8]


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _readable(name) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:60]


@dataclass
class Remembered:
    """corpus.json: how the records of a corpus are read; of one on the hub also where and what it is."""

    text_field: str | None = None
    revision: str | None = None
    repo: str | None = None
    files: list[str] = field(default_factory=list)


def _recall(name, **options) -> Remembered:
    """What is remembered of a corpus, with the options that are given; written back if they change it."""
    folder = base_dir() / "corpus" / f"{_readable(name.replace(':', '-'))}-{_digest(name)[:8]}"
    remembered = Remembered()
    if (folder / "corpus.json").exists():
        remembered = read_json(folder / "corpus.json", Remembered, f"remove {folder}")
    given = {key: value for key, value in options.items() if value is not None}
    changed = replace(remembered, **given)
    if changed != remembered:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "corpus.json", {"name": name, **asdict(changed)})
    return changed
