"""Datasets on the hub: which files they have, and how those come to this machine."""

import errno
import time
from pathlib import Path

from nanomuon.documents import RECORD_SUFFIXES
from nanomuon.runtime import InputError, base_dir

SUFFIXES = (".txt", *RECORD_SUFFIXES, ".json", ".json.gz", ".json.zst")  # .json: lines, by the hub's custom


def download(repo: str, file: str, revision: str) -> Path:
    """The file of a dataset on this machine, fetched if it is not there yet; InputError where that fails."""
    from huggingface_hub import hf_hub_download

    def fetch():  # resumes a partial file, checks the size and, where the hub knows it, the hash
        return hf_hub_download(
            repo, file, repo_type="dataset", revision=revision, cache_dir=base_dir() / "corpus" / "hub"
        )

    return Path(_patiently(fetch, f"fetching {file} of {repo}"))


def resolve(name: str) -> dict:
    """The revision and the files of a dataset. A folder stands for a dataset, as it does in `datasets`."""
    path, _, revision = name.removeprefix("hf:").partition("@")
    path, _, config = path.partition(":")
    on_hub = not Path(path).is_dir()

    def ask():
        from datasets import load_dataset_builder
        from huggingface_hub import HfApi

        if on_hub:
            # fails at once where there is no network; the builder alone would try for half a minute
            sha = HfApi().dataset_info(path, revision=revision or None, timeout=10).sha
        else:
            sha = None
        cache = str(base_dir() / "corpus" / "hub")
        builder = load_dataset_builder(path, config or None, revision=sha, cache_dir=cache)
        return sha or builder.hash, builder.config.data_files or {}

    revision, files = _patiently(ask, f"opening {name}", begun=False)
    if "train" not in files:
        raise InputError(f"corpus {name} has no train split (it has: {', '.join(files) or 'no data files'})")
    files = [file.split(f"@{revision}/", 1)[-1] for file in files["train"]]
    for file in files:
        if not file.lower().endswith(SUFFIXES):
            raise InputError(f"corpus {name} holds {file}, which is none of {', '.join(SUFFIXES)}")
    return {"revision": revision, "repo": path if on_hub else None, "files": files}


def _patiently(call, what, begun=True):
    """call(), again after 1, 2, 4, 8 and 16 s where the trouble may pass.

    That is the hub's answer of 429 or 5xx and, once a transfer was `begun`, a lost connection. A machine
    without network thus fails at its first question.
    """
    waits = [1, 2, 4, 8, 16]
    while True:
        try:
            return call()
        except Exception as error:  # the clients of the hub raise their own kinds, httpx's and OSError's
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if not waits or not _may_pass(error, begun):
                raise InputError(
                    f"{what} failed: {reason}. Check name and network; "
                    "offline, CORPUS=python bash speedrun.sh works"
                ) from error
            wait = waits.pop(0)
            print(f"{what}: {reason}; again in {wait} s", flush=True)
            time.sleep(wait)


def _may_pass(error, begun) -> bool:
    """Whether trying again may help: the hub is busy, or a connection was lost that there had been."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status:
        return status == 429 or status >= 500
    return begun
