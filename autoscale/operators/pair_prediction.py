"""What requests see on a prefill and a decode pool with fixed counts, by queueing formulas (pure).

In each window of the trace, prompts wait as in M/G/R: the mean wait of M/M/R (Eq. 1) times (1 + cv^2) / 2, with an
exponential tail (Allen and Cunneen). Work that a window leaves over is added to the waits of the next one. Decode has
the batch at which answers leave as fast as they come (Little's law). The length rule of the router sends short prompts
to decode, and longer ones while prefill has a backlog: its bound is the mean one in a window.
"""

from dataclasses import dataclass

import numpy as np

from autoscale.engines.profile import EngineProfile
from autoscale.operators.pair_load import Floats, PairLoad
from autoscale.operators.pool_pair import Effect, LengthRule, Objectives, PoolPair
from autoscale.operators.queueing import erlang_c

# Points of the distribution of waits of prompts that wait, at equal shares.
_WAIT_POINTS = 12
# Points of a normal distribution, in standard deviations, at equal shares.
_POINTS = np.array([-1.4, -0.53, 0.0, 0.53, 1.4])
# An answer sees the mean of the batches of its whole time, which varies half as much (in variance) as one batch does.
_BATCH_SPREAD = 0.5
# Highest busy share for which a queue's wait is computed; work beyond it is left over for the next window.
_MOST_BUSY = 0.97
# Rounds of the fixed points: batch and step time, backlog and length bound.
_ROUNDS = 16
# Share of the way to the next bound in a round: the bound that relieves prefill fills decode, which lowers it again.
_ROUND_FRAC = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decode:
    """Decode in one window: seconds of a step, TPOT, the wait of local prompts, and free share of slots and KV."""

    step_s: float
    tpot_s: Floats
    local_wait_s: float
    headroom_frac: float
    served_frac: float


def predict(pair: PoolPair, load: PairLoad, rule: LengthRule, objectives: Objectives) -> Effect:
    """The effect of a pair of pools on a load."""
    tables = _Tables(pair, load)
    ttfts, weights, kept = [], [], []
    tpots, tpot_weights = [], []
    prompts_behind_s = answers_behind_s = 0.0
    for number, rate in enumerate(load.rates_per_s):
        members = np.flatnonzero(load.window == number)
        if not members.size or rate <= 0.0:
            prompts_behind_s = max(0.0, prompts_behind_s - load.window_s)
            answers_behind_s = max(0.0, answers_behind_s - load.window_s)
            continue
        window = _Window(pair, load, rule, tables, members, float(rate), prompts_behind_s)
        decode = window.decode
        next_behind_s = max(0.0, answers_behind_s + load.window_s * (1.0 / decode.served_frac - 1.0))
        ttft = window.ttft_s + (answers_behind_s + next_behind_s) / 2.0
        answers_behind_s, prompts_behind_s = next_behind_s, window.next_behind_s
        weight = rate / members.size
        has_tpot = np.mean(decode.tpot_s <= objectives.tpot_s, axis=1)[:, None]
        ttfts.append(ttft.ravel())
        weights.append(window.weights.ravel() * weight)
        kept.append(((ttft <= objectives.ttft_s) * has_tpot).ravel())
        tpots.append(decode.tpot_s.ravel())
        tpot_weights.append(np.full(decode.tpot_s.size, rate / decode.tpot_s.size))
    weight = np.concatenate(weights)
    return Effect(
        gpus=pair.gpus,
        ttft_p90_s=_quantile(np.concatenate(ttfts), weight, 0.9),
        tpot_p90_s=_quantile(np.concatenate(tpots), np.concatenate(tpot_weights), 0.9),
        attained_frac=float(np.average(np.concatenate(kept), weights=weight)),
    )


class _Tables:
    """Seconds of each sampled request on the engines: its prompt on prefill, on decode, and its hand-over."""

    def __init__(self, pair: PoolPair, load: PairLoad) -> None:
        lengths, place = np.unique(load.input_tokens, return_inverse=True)
        prefill, decode, handoff = pair.prefill.prefill, pair.decode.prefill, pair.prefill.handoff
        self.remote_s = np.array([prefill.seconds_for(tokens) for tokens in lengths])[place]
        self.local_s = np.array([decode.chunk_s(0.0, tokens) for tokens in lengths])[place]
        self.handoff_s = np.array([handoff.seconds_for(tokens) for tokens in lengths])[place]


class _Window:
    """One window: where prompts are computed, and how long they take."""

    def __init__(
        self,
        pair: PoolPair,
        load: PairLoad,
        rule: LengthRule,
        tables: _Tables,
        members: np.ndarray,
        rate: float,
        behind_s: float,
    ) -> None:
        self._pair, self._load, self._rule, self._rate = pair, load, rule, rate
        self._inputs, self._outputs = load.input_tokens[members], load.output_tokens[members]
        self._remote_s, self._local_s = tables.remote_s[members], tables.local_s[members]
        self._handoff_s = tables.handoff_s[members]
        self._behind_s = behind_s
        usual = self._inputs <= rule.local_max_tokens
        self._raised, self._waits_frac, self._is_usual = usual, 0.0, usual
        self._bound_tokens = rule.local_max_tokens
        for _ in range(_ROUNDS):
            self.decode = self._decode()
            self._queue()

    @property
    def _local_frac(self) -> Floats:
        """Share of the time in which each prompt would be computed on decode."""
        shares: Floats = np.where(self._is_usual, 1.0, self._waits_frac * self._raised)
        return shares

    def _decode(self) -> _Decode:
        """The batch at which answers leave as fast as they come."""
        profile, replicas = self._pair.decode, self._pair.decode_replicas
        context = self._load.lengths.context_tokens
        prompts = self._local_frac * self._rate / replicas / self._inputs.size
        prompts_frac = min(0.9, float(np.sum(prompts * self._local_s)))
        tokens_per_s = self._rate * float(self._outputs.mean()) / replicas
        most = float(max(1, min(profile.max_running, int(profile.kv_tokens / (context + profile.block_tokens / 2)))))

        def step_s(batch: float) -> float:
            return _step_s(profile, batch, context) / (1.0 - prompts_frac)

        low, high = 0.0, most
        for _ in range(30):  # batch / step grows with the batch
            middle = (low + high) / 2.0
            low, high = (middle, high) if middle / step_s(middle) < tokens_per_s else (low, middle)
        batch = high
        # The batch varies, and so do the prompts that an answer meets: their stalls are a compound Poisson sum.
        slope_s = step_s(min(most, batch + 1.0)) - step_s(batch)
        by_batch = batch * _BATCH_SPREAD * slope_s**2
        by_stalls = float(np.sum(prompts * self._local_s**2)) * step_s(batch) / self._outputs
        spread_s = np.sqrt(by_batch + by_stalls)[:, None] * _POINTS[None, :]
        used = max(batch / profile.max_running, batch * context / profile.kv_tokens)
        return _Decode(
            step_s=step_s(batch),
            tpot_s=np.maximum(_step_s(profile, 1.0, context), step_s(batch) + spread_s),
            # Pollaczek and Khinchine: local prompts wait for each other as in M/G/1.
            local_wait_s=float(np.sum(prompts * self._local_s**2)) / 2.0 / (1.0 - prompts_frac),
            headroom_frac=max(0.0, 1.0 - used),
            served_frac=min(1.0, most / step_s(most) / tokens_per_s),
        )

    def _queue(self) -> None:
        """The queue of prefill, and the bound of the length rule that follows from it."""
        rule, replicas = self._rule, self._pair.prefill_replicas
        share = 1.0 - self._local_frac
        rate = self._rate * float(share.mean())
        mean_s = float(np.average(self._remote_s, weights=share)) if rate else 0.0
        busy = rate * mean_s / replicas
        self.next_behind_s = max(0.0, self._behind_s + (busy - _MOST_BUSY) * self._load.window_s)
        stable = min(busy, _MOST_BUSY)
        self._waits_frac = float(erlang_c(replicas, stable)) if rate else 0.0
        spread = float(np.average((self._remote_s - mean_s) ** 2, weights=share)) / mean_s**2 if mean_s else 0.0
        # Allen and Cunneen: the mean wait of prompts that wait.
        self._mean_wait_s = mean_s * (1.0 + spread) / 2.0 / (replicas * (1.0 - stable))
        usual = rule.local_max_tokens * min(1.0, self.decode.headroom_frac / max(rule.decode_busy_frac, 1e-9))
        self._is_usual = self._inputs <= usual
        bound = usual
        if self.decode.headroom_frac >= rule.decode_room_frac and mean_s:
            tokens_per_s = float(np.average(self._inputs, weights=share)) / mean_s
            # What a prompt that must wait finds on the replica with the shortest queue: all that delays it.
            backlog = (self._mean_wait_s + self._behind_s) * tokens_per_s
            cap = max(
                rule.local_max_tokens,
                min(rule.local_cap_tokens, rule.local_tokens_per_output_token * float(self._outputs.mean())),
            )
            bound = min(cap, usual + rule.backlog_share_frac * backlog)
        self._bound_tokens += _ROUND_FRAC * (bound - self._bound_tokens)
        self._raised = self._inputs <= self._bound_tokens

    @property
    def _wait_points(self) -> tuple[Floats, Floats]:
        """Waits of prefill and their shares: no wait first."""
        shares = (np.arange(_WAIT_POINTS) + 0.5) / _WAIT_POINTS
        waits = np.concatenate([[0.0], -np.log(1.0 - shares) * self._mean_wait_s])
        frac = np.concatenate([[1.0 - self._waits_frac], np.full(_WAIT_POINTS, self._waits_frac / _WAIT_POINTS)])
        return waits + (self._behind_s + self.next_behind_s) / 2.0, frac

    @property
    def ttft_s(self) -> Floats:
        """Time to first token, by request and by point of the wait."""
        waits, _ = self._wait_points
        step_s = self.decode.step_s
        # A request enters decode in the middle of a step, and has its token at the end of the next one.
        remote_s = (self._remote_s + self._handoff_s)[:, None] + waits[None, :] + 1.5 * step_s
        local_s = (self._local_s + self.decode.local_wait_s + 1.5 * step_s)[:, None]
        is_waiting = (np.arange(waits.size) > 0)[None, :]
        is_local = self._is_usual[:, None] | (self._raised[:, None] & is_waiting)
        return np.where(is_local, local_s, remote_s)

    @property
    def weights(self) -> Floats:
        """Share of each point of ``ttft_s``, which sum up to one for each request."""
        return np.broadcast_to(self._wait_points[1][None, :], (self._inputs.size, _WAIT_POINTS + 1)).copy()


def _step_s(profile: EngineProfile, batch: float, context_tokens: float) -> float:
    """Seconds of a decode step; a batch between two whole ones lies on the line between them."""
    least = max(1, int(batch))
    first = profile.decode.seconds_for(least, context_tokens)
    if batch <= least:
        return first
    return first + (batch - least) * (profile.decode.seconds_for(least + 1, context_tokens) - first)


def _quantile(values: Floats, weights: Floats, frac: float) -> float:
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(shares, frac)), values.size - 1)])
