"""What a replica is for and where it may sit: the roles of a deployment group."""

from enum import StrEnum


class Role(StrEnum):
    """What a replica does for a request (HeteroScale section 2.1)."""

    PREFILL = "prefill"
    DECODE = "decode"
