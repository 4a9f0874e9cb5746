"""The names by which the control plane knows its pools."""

from dataclasses import dataclass
from typing import Self

from kvtransfer.topology import Role


@dataclass(frozen=True, slots=True)
class PoolKey:
    """All replicas of one role in one deployment group: one Serve deployment."""

    group: str
    role: Role

    @property
    def deployment_name(self) -> str:
        """The Serve deployment's name, ``role:group``."""
        return f"{self.role}:{self.group}"

    @classmethod
    def parse(cls, deployment_name: str) -> Self:
        """The pool of a deployment name.

        Raises:
            ValueError: the name is not ``prefill:GROUP`` or ``decode:GROUP``.
        """
        role, separator, group = deployment_name.partition(":")
        if not separator or not group or role not in set(Role):
            raise ValueError(f"deployment {deployment_name!r} is no pool: expected 'prefill:GROUP' or 'decode:GROUP'")
        return cls(group, Role(role))
