"""Text of others, such as a node's name, made safe to show: what cannot be seen is spelt out.

Terminals obey control characters, and a right-to-left mark turns around what stands behind it, so
that a name could pass for another one.
"""

from __future__ import annotations

import re

#: Controls but for tab and newline, marks of direction, what has no width, separators of lines,
#: halves of characters. Joiners (U+200C, U+200D) stay: scripts and emoji are spelt with them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""Returns a text with what cannot be seen as an escape: `\x1b`, `\u202e`."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)
