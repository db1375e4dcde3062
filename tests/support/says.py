"""What an error says."""

from collections.abc import Callable
from typing import Any

import pytest


def says(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """`call` raises an error of class `kind` whose message has `words` in this order."""
    with pytest.raises(kind) as caught:
        call()
    text, at = str(caught.value), 0
    for word in words:
        assert word in text[at:], f"{word!r} is not (any more) in: {text}"
        at = text.index(word, at) + len(word)
