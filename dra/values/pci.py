"""PCI addresses in their two spellings.

NVML writes an 8-digit upper-case domain (`00000000:1A:00.0`), sysfs and the attribute
`resource.kubernetes.io/pciBusID` a lower-case one of at least 4 digits (`0000:1a:00.0`). Domains above ffff
(VMD) keep all their digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dra.errors import ValueFormatError

_FORM = re.compile(
    r"(?:(?P<domain>[0-9a-fA-F]{1,8}):)?(?P<bus>[0-9a-fA-F]{1,2}):(?P<device>[0-9a-fA-F]{1,2})\.(?P<function>[0-7])",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, order=True)
class PciAddress:
    """domain:bus:device.function as numbers; orders as the machine enumerates."""

    domain: int
    bus: int
    device: int
    function: int

    @classmethod
    def parse(cls, text: str) -> PciAddress:
        """Read either spelling.

        Raises:
            ValueFormatError: DRA-PCI-ADDRESS.
        """
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueFormatError(
                "DRA-PCI-ADDRESS", f"{text!r} is not a PCI address", remedy="Write it as 0000:1a:00.0."
            )
        return cls(
            int(match["domain"] or "0", 16),
            int(match["bus"], 16),
            int(match["device"], 16),
            int(match["function"]),
        )

    def __str__(self) -> str:
        """Give the sysfs spelling, `0000:1a:00.0`."""
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function}"
