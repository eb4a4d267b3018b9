"""How a command reports a user's mistake."""

import contextlib
import re

import pytest

from nanomuon.command import explain


@contextlib.contextmanager
def refused(said):
    """Check that the block raises an error that ends a command with exit code 2 and one line that matches the
    pattern `said`.
    """
    with pytest.raises(Exception) as caught:
        yield
    code, message = explain(caught.value)
    assert code == 2 and message.startswith("error: ") and message.count("\n") == 1, message
    assert re.search(said, message.removeprefix("error: ")), message
