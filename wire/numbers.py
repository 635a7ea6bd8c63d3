"""Numbers, and single words, as a peer may send them. A value beyond is refused where a message is decoded, and costs
its sender the link.

msgpack has integers up to 2^64 - 1 and floats that are no number; databases, JSON and everybody's arithmetic do not.
Where a value that is not finite has an honest meaning (a loss that diverged), the field is a plain float.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

LARGEST = (1 << 63) - 1

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
"""how many, or which, from 0"""
Number = Annotated[int, Meta(ge=-LARGEST - 1, le=LARGEST)]
"""an integer of 64 bits with its sign"""
Amount = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""a finite quantity: seconds, milliseconds"""
Pace = Annotated[float, Meta(gt=0.0, le=1e12)]
"""milliseconds that somebody declares to take"""
Word = Annotated[str, Meta(max_length=64)]
"""what everybody who looks on is sent again and again"""
