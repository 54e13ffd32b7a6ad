"""What a rank brings to a reduction; `Schedule.traffic` tells what it sends of that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Payload:
    """What a rank brings: `records` records of `record_bytes` bytes, never cut within `group` of them."""

    records: int = 16
    record_bytes: int = 520
    group: int = 1

    @property
    def bytes(self) -> int:
        return self.records * self.record_bytes
