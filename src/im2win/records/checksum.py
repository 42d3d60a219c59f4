"""The checksum of a record's line, which finds damage and edits by hand.

It is SHA-256, shortened to 16 digits, as other digests of records are. A CRC of 32 bits would find a flipped bit as well, but is made for
such errors, not for what an editor or a merge makes of a line, and it saves nothing: to parse a line costs far more than its SHA-256. The
checksum is no signature: whoever can write a log can compute it, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FIELD = "checksum"  # its name in a line
_DIGITS = 16


def checksum(values: Mapping[str, Any]) -> str:
    """The checksum of a line's values as JSON holds them, whatever their order and the spaces between them; its own field does not count.

    Raises:
        ValueError, TypeError: a value that JSON does not hold, or that is nested too deeply.
    """
    content = {name: value for name, value in values.items() if name != FIELD}
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
