"""Make untrusted text, such as a node's name, safe to display by escaping invisible characters.

Terminals interpret control characters, and a right-to-left mark reverses the text that follows. One
name could therefore be mistaken for another.
"""

from __future__ import annotations

import re

#: Control characters other than tab and newline, direction marks, zero-width characters, line
#: separators, surrogates. Joiners (U+200C, U+200D) are kept: some scripts and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""Return text with invisible characters replaced by escapes: `\x1b`, `\u202e`."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)
