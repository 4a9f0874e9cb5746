"""The load of a group's prefill replicas, as its own queue observes it: lengths, arrivals, Kingman's wait (pure)."""

# Weight of each new prompt in the means: they follow about the last 100 prompts. The shares of lengths and the variance
# of gaps need that number; a smaller weight follows a change of the load later.
_WEIGHT = 0.01
# Highest load for which Kingman's formula is used, 0..1. At 1 it has no finite value, and the observed load of a short
# time may be above 1.
_MOST_LOAD = 0.95


class PrefillLoad:
    """Moments of the lengths and of the gaps between arrivals, and the mean time that a replica takes for a prompt."""

    def __init__(self) -> None:
        self._tokens = _Moments()
        self._gaps_s = _Moments()
        self._services_s = _Moments()
        self._arrived_s: float | None = None  # time of the last arrival
        self._changed_s = 0.0  # time of the last change of the number of busy replicas
        self._busy_s = 0.0  # busy time of all replicas since the last prompt was computed
        self._replicas = 1

    def arrive(self, tokens: int, now_s: float) -> None:
        """A prompt has come to the queue."""
        self._tokens.add(tokens)
        if self._arrived_s is not None:
            self._gaps_s.add(max(0.0, now_s - self._arrived_s))
        self._arrived_s = now_s

    def pass_time(self, busy_replicas: int, replicas: int, now_s: float) -> None:
        """Until now ``busy_replicas`` of the group's ``replicas`` had prompts, since the last call."""
        self._busy_s += busy_replicas * max(0.0, now_s - self._changed_s)
        self._changed_s = now_s
        self._replicas = max(1, replicas)

    def compute(self) -> None:
        """A replica has computed a prompt; call ``pass_time`` first."""
        self._services_s.add(self._busy_s)
        self._busy_s = 0.0

    @property
    def input_tokens_mean(self) -> float:
        """Mean length of the last prompts, tokens: DOPD's ``i_next``, the expected length of the next one."""
        return self._tokens.mean

    @property
    def wait_s(self) -> float:
        """Kingman's mean wait of a prompt for a replica, seconds; 0 before the first prompt has been computed.

        ``W_q = rho / (1 - rho) x (c_a^2 + c_s^2) / 2 x E[S]`` (DOPD Eq. 10 and 16). The replicas count as one that is
        as fast as all of them. The time of a prompt is taken as proportional to its length, so c_s^2 is that of the
        lengths.
        """
        gap_s, service_s = self._gaps_s.mean, self._services_s.mean / self._replicas
        if not gap_s or not service_s:
            return 0.0
        load = min(_MOST_LOAD, service_s / gap_s)
        variation = self._gaps_s.relative_variance + self._tokens.relative_variance
        return load / (1.0 - load) * variation / 2.0 * service_s


class _Moments:
    """Mean and variance of a quantity, the last values most."""

    __slots__ = ("_count", "_square", "mean")

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0  # 0 before the first value
        self._square = 0.0  # mean of the squares

    def add(self, value: float) -> None:
        self._count += 1
        weight = max(_WEIGHT, 1.0 / self._count)  # the first values have the same weight
        self.mean += weight * (value - self.mean)
        self._square += weight * (value * value - self._square)

    @property
    def relative_variance(self) -> float:
        """Squared coefficient of variation; 0 before the first value."""
        return max(0.0, self._square / self.mean**2 - 1.0) if self.mean else 0.0
