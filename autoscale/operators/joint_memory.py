"""GPUs whose memory holds a choice of options if each of them hosts all operators (pure)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoscale.operators.options import OptionTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class JointMemory:
    """Memory of options; those of all operators are in one row, as in ``Together``."""

    table: OptionTable

    @cached_property
    def _bytes(self) -> Floats:
        """By option, three columns of bytes.

        They are the bytes on each of its GPUs with the KV of one batch, the same without any KV, and the KV of one
        request on all of its GPUs together.
        """
        rows = [
            (one.gpu_bytes(at, 0.0), one.gpu_bytes(at, 0.0) - kv * int(one.batch[at]) / int(one.parallel[at]), kv)
            for one in self.table.operators
            for at, kv in enumerate(one.kv_bytes.tolist())
        ]
        return np.array(rows)

    def gpus(self, at: Ints) -> float:
        """The fewest GPUs for the options at these places of the row; infinite: one GPU cannot host all operators."""
        return float(self._gpus(self._bytes[at].sum(axis=0)))

    def gpus_after_moves(self, at: Ints, owner: Ints) -> Floats:
        """As ``gpus``, for each option of the row in place of the present option of its operator.

        ``owner``: by option, the number of its operator.
        """
        return self._gpus(self._bytes[at].sum(axis=0) - self._bytes[at][owner] + self._bytes)

    def _gpus(self, sums: Floats) -> Floats:
        """``sums``: the columns of ``_bytes``, summed over all operators, in the last dimension."""
        batch_bytes, bare_bytes, kv_bytes = sums[..., 0], sums[..., 1], sums[..., 2]
        room = self.table.memory_bytes - bare_bytes
        fits = (batch_bytes <= self.table.memory_bytes) & (room > 0.0)
        held = np.ceil(self.table.in_flight * kv_bytes / np.where(fits, room, 1.0) - 1e-9)
        gpus: Floats = np.where(fits, np.maximum(held, 1.0), np.inf)
        return gpus
