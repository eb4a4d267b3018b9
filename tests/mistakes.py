"""A user's mistake, as a command reports it."""

import contextlib
import re

import pytest

from nanomuon.command import explain


@contextlib.contextmanager
def refused(said):
    """The error that the block raises ends a command with exit code 2 and one line, in which the pattern
    `said` is found.
    """
    with pytest.raises(Exception) as caught:
        yield
    code, message = explain(caught.value)
    assert code == 2 and message.startswith("error: ") and message.count("\n") == 1, message
    assert re.search(said, message.removeprefix("error: ")), message
