"""A peer on hivemind whose torch optimizer stays the user's: rounds at the swarm's target, true means, late joiners in step.

Not built on `hivemind.Optimizer`, which steps by the clock's estimate, and after a failed round with a gradient of zeros.
A micro-batch costs 7 us here. A small model's round blocks for 40 to 100 ms on loopback: a look at the roster, the group,
the all-reduce; the others hear of the round's end up to 0.4 s late, and go on computing for it till then. The survivors of
a killed peer step 5.2 s after its death (`forget_after_s` is 5), with all that they have gathered.

Every peer names its parameters by their `lineage`: a hash of those it began with and of each group whose mean it applied.
Only peers of one lineage average; whoever is behind, or on the losing side of a network that was cut, downloads the state.
So a peer that missed a mean, for whatever reason, can be late but not wrong. Buffers that a model computes by itself
(running statistics) are not averaged: each peer has its own, and a late joiner begins with those of its donor.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from torch import Tensor

from bareloop.swarm.addresses import checked
from bareloop.swarm.engine import RoundFailed, StateReplaced, TrainingState
from bareloop.swarm.hivemind_company import Company
from bareloop.swarm.hivemind_meeting import Meeting, meet
from bareloop.swarm.hivemind_options import HivemindOptions, compression_of, open_dht
from bareloop.swarm.hivemind_roster import PeerRecord, Roster, group_key, lineage_after
from bareloop.swarm.hivemind_rounds import Attempt, RoundAverager
from bareloop.swarm.state import fingerprint, pack, schema, unpack

__all__ = ["HivemindEngine", "HivemindOptions"]

_LOG = logging.getLogger(__name__)

_START_S = 120.0
"""Longest time for one of hivemind's processes to start, in seconds; a second on an idle machine."""

_LEAVE_S = 10.0
"""Longest time for one of them to end."""

_SEARCH_S = 3600.0
"""A group is looked for until this peer says stop."""

_FIRST_AVERAGE_S = 300.0
"""Limit for an all-reduce, in seconds, before one was measured; then five times the slowest, and 30 s at least."""

_WATCHED_S = 10.0
"""Seconds for which a record for `bareloop swarm watch` is kept."""


class HivemindEngine:
    """One peer of the run `run_id`; an `Engine`.

    Args:
        run_id: the run's name, the same for all peers, without a dot.
        target_batch: samples of all peers that make a round.
        peers: addresses of peers that are there already, as hivemind prints them; none begins a new swarm.
        options: see there.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        run_id: str,
        target_batch: float,
        peers: Sequence[str] = (),
        options: HivemindOptions | None = None,
    ) -> None:
        if not run_id or "." in run_id:
            raise ValueError(
                f"run_id={run_id!r}: must be a name without a dot, which hivemind's group keys don't allow"
            )
        if not 0 < target_batch < float("inf"):
            raise ValueError(f"target_batch={target_batch!r}: must be a number of samples above 0")
        self._run_id, self._target, self._addresses = run_id, target_batch, checked("hivemind", peers)
        self._options = options or HivemindOptions()
        self._opened: list[Any] = []
        """What `close` has to close, in the order of opening."""
        self._lineage, self._next = "", ""
        """Names of the parameters: now, and when the last mean is applied."""
        self._checked, self._behind = 0, False
        self._last_call = self._round_began = 0.0
        self._slowest_average_s: float | None = None
        self._retry_at = 0.0
        self._at_rest, self._stepping = threading.Lock(), False
        """Held while the parameters change: from a mean to `applied`, and while a state is loaded."""

    @property
    def round(self) -> int:
        return self._roster.mine.round

    @property
    def peers(self) -> int:
        return 1 + len(self._roster.view.others)

    @property
    def global_samples(self) -> float:
        mine = self._roster.mine
        return mine.samples + sum(p.samples for p in self._roster.view.beside(mine.round, self._lineage))

    @property
    def addresses(self) -> list[str]:
        """Where others reach this peer: what they give as `peers`. None for a client."""
        return [] if self._options.client else [str(address) for address in self._dht.get_visible_maddrs()]

    def start(self, state: TrainingState, buffers: Sequence[Tensor], *, round: int = 0) -> None:
        """Joins the run; where peers are further than `round`, loads their state into `state` before it returns.

        Raises:
            ValueError: the state can't be sent to peers; a gradient is of a type that is not averaged.
            RuntimeError: no peer answers at the addresses given, their models differ, or their state can't be had.
        """
        odd = {b.dtype for b in buffers} - {torch.float32, torch.float16, torch.bfloat16}
        if odd:
            raise ValueError(f"gradients of {odd.pop()}: hivemind sums in float32; use float32, float16 or bfloat16")
        pack(state)  # what can't be sent is said now, not to the first who asks
        self._state = state
        try:
            self._open(buffers, round)
            view = self._roster.look(_START_S)
            if any(p.schema != self._roster.mine.schema for p in view.others):
                raise RuntimeError(f"the peers of {self._run_id!r} train another model: take another run_id")
            self._catch_up()
        except RoundFailed as failed:
            self.close()
            raise RuntimeError(f"{self._run_id!r} can't be joined: {failed}") from failed
        except BaseException:
            self.close()
            raise
        self._last_call = self._round_began = time.monotonic()
        self._report(now=True)

    def ready(self, samples: float) -> bool:
        """See `Engine.ready`."""
        now = time.monotonic()
        self._moving(False)  # a mean that was not applied
        mine, view = self._roster.mine, self._roster.view
        pace_s = max(now - self._last_call, 0.95 * mine.pace_s)
        rate = samples / max(now - self._round_began, 1e-6)
        self._last_call = now
        self._roster.report(replace(mine, samples=float(samples), pace_s=pace_s, rate=rate))
        if view.read != self._checked:
            self._checked, self._behind = view.read, bool(view.ahead_of(mine.round, self._lineage))
        if self._behind and now >= self._retry_at:
            self._replace_state()
        if self._behind or samples <= 0 or self.peers < self._options.min_peers:
            return False
        called = any(p.waiting for p in view.beside(mine.round, self._lineage))
        return called or self.global_samples >= self._target

    def average(self, buffers: Sequence[Tensor], samples: float) -> float:
        """See `Engine.average`."""
        self._moving(False)
        for view, buffer in zip(self._views, buffers, strict=True):
            view.copy_(buffer)
        self._report(samples=float(samples), waiting=True, now=True)
        try:
            self._roster.look(self._options.forget_after_s)
            mean = meet(self._averager, self._meeting(samples))
        except RoundFailed:
            if self._roster.view.ahead_of(self.round, self._lineage):
                self._replace_state()
            raise
        finally:
            self._report(waiting=False, now=True)
            self._last_call = time.monotonic()
        total = samples if mean is None else sum(mean.samples.values())
        if not total:
            raise RoundFailed("no peer has a gradient that is finite")
        self._company.met(self.round, mean)
        name = self._roster.mine.peer if mean is None else mean.group
        if mean is not None:
            self._slowest_average_s = max(mean.average_s, 0.9 * (self._slowest_average_s or 0.0))
            for view, buffer in zip(self._views, buffers, strict=True):
                buffer.copy_(view)
        self._next = lineage_after(self._lineage, name)
        self._moving(True)
        return total

    def applied(self) -> None:
        """See `Engine.applied`."""
        self._company.before, self._lineage = self._lineage, self._next
        self._last_call = self._round_began = time.monotonic()
        self._report(round=self.round + 1, lineage=self._lineage, samples=0.0, now=True)
        self._moving(False)

    def publish(self, record: str) -> None:
        """See `Engine.publish`."""
        key, until = f"{self._run_id}.bareloop", get_dht_time() + _WATCHED_S
        try:
            self._dht.store(key, record, until, subkey=self._roster.mine.peer, return_future=True)
        except OSError:  # the DHT's process is gone: the next round says so
            pass

    def close(self) -> None:
        """See `Engine.close`."""
        while self._opened:
            opened = self._opened.pop()
            if isinstance(opened, Roster):
                opened.close(replace(opened.mine, left=True))
            elif opened.is_alive():
                opened.shutdown()
                opened.join(_LEAVE_S)

    # Joining.

    def _open(self, buffers: Sequence[Tensor], round: int) -> None:
        validators = list(self._options.record_validators)
        signature = next((v for v in validators if isinstance(v, RSASignatureValidator)), None)
        if signature is None:
            # hivemind's own key is one a process, and forked peers would overwrite each other's records
            signature = RSASignatureValidator(RSAPrivateKey())
            validators.append(signature)
        self._dht = open_dht(self._addresses, self._options, validators)
        self._opened.append(self._dht)
        sizes = [b.numel() for b in buffers]
        self._host = torch.zeros(sum(sizes)).share_memory_()
        self._views = self._host.split(sizes)
        self._averager = RoundAverager(
            [self._host],
            self._dht,
            self._run_id,
            compression=compression_of(self._options),
            silence_s=self._options.forget_after_s,
            snapshot=self._snapshot,
        )
        self._averager.launch(_START_S)
        self._opened.append(self._averager)
        self._lineage = f"{round}-{fingerprint(self._state.model)}"
        mine = PeerRecord(
            peer=self._dht.peer_id.to_bytes(),
            round=round,
            lineage=self._lineage,
            samples=0.0,
            rate=0.0,
            pace_s=0.0,
            waiting=False,
            loading=False,
            schema=schema(self._state.model),
            client=self._options.client,
            left=False,
            beat=0,
        )
        forget_s, key = self._options.forget_after_s, f"{self._run_id}.peers"
        self._roster = Roster(self._dht, key, signature.local_public_key, mine, forget_s, self._eta_s)
        self._company = Company(self._roster, self._options)
        self._roster.start()
        self._opened.append(self._roster)

    def _report(self, *, now: bool, **changes: Any) -> None:
        self._roster.report(replace(self._roster.mine, **changes), now=now)

    def _eta_s(self) -> float:
        """Seconds that the round will last by the present rates; 0 while the others are waited for."""
        mine = self._roster.mine
        if mine.waiting:
            return 0.0
        rate = mine.rate + sum(p.rate for p in self._roster.view.beside(mine.round, mine.lineage))
        return max(self._target - self.global_samples, 0.0) / max(rate, 1e-9)

    # The state: handing it over, and taking it from others.

    def _snapshot(self) -> tuple[str, list[Tensor]]:
        """This peer's state, for one that downloads; called in a thread of the averager's."""
        if not self._at_rest.acquire(timeout=self._options.state_timeout_s):
            raise TimeoutError(f"this peer has been stepping for {self._options.state_timeout_s:g} s")
        try:
            mine = self._roster.mine
            text, tensors = pack(self._state)
            self._company.hold(self._lineage)
        finally:
            self._at_rest.release()
        layout = {"round": mine.round, "lineage": self._lineage, "state": text, "tensors": len(tensors)}
        return json.dumps(layout), tensors

    def _moving(self, stepping: bool) -> None:
        """Says whether the parameters change from now on."""
        if stepping and not self._stepping:
            self._at_rest.acquire()
        elif self._stepping and not stepping:
            self._at_rest.release()
        self._stepping = stepping

    def _replace_state(self) -> None:
        """Takes the state of those ahead; returns where there is no need any more, or where it can't be had now.

        Raises:
            StateReplaced: it was taken.
        """
        try:
            replaced = self._catch_up()
        except RoundFailed as failed:
            _LOG.warning("%s; trying again in %.0f s", failed, self._options.forget_after_s)
            self._retry_at = time.monotonic() + self._options.forget_after_s
            return
        self._behind = False
        if replaced:
            raise StateReplaced(f"the others had gone on: this peer now has their state of round {self.round}")

    def _catch_up(self) -> bool:
        """Downloads the state of the peers ahead until none is; whether it had to.

        Raises:
            RoundFailed: it could not be had in time.
            RuntimeError: it does not fit this model.
        """
        began, tries, failure, loaded = time.monotonic(), 0, "only peers in client mode have it", False
        while ahead := self._roster.look(self._options.forget_after_s).ahead_of(self.round, self._lineage):
            donors = sorted((p for p in ahead if not p.client), key=lambda p: p.peer)
            left_s = self._options.state_timeout_s - (time.monotonic() - began)
            if left_s <= 0:
                raise RoundFailed(f"the state of round {ahead[0].round} could not be downloaded: {failure}")
            if donors:
                try:
                    self._download(donors[tries % len(donors)], left_s)
                    loaded = True
                except (AllreduceException, TimeoutError) as error:
                    failure, tries = str(error), tries + 1
                    time.sleep(min(0.2 * tries, left_s, 2.0))
        return loaded

    def _download(self, donor: PeerRecord, limit_s: float) -> None:
        before, began = self._roster.mine, time.monotonic()
        text, tensors = self._averager.download(donor.peer, limit_s)
        try:
            layout = json.loads(text.result(limit_s))
            # From now on the others of that round wait for this peer.
            at = {"round": int(layout["round"]), "lineage": str(layout["lineage"]), "samples": 0.0}
            self._report(**at, loading=True, now=True)
            received = tensors.result(max(limit_s - (time.monotonic() - began), 1.0))
            if len(received) != layout["tensors"]:
                raise AllreduceException(f"{len(received)} of {layout['tensors']} tensors came: the donor left")
        except BaseException:
            self._roster.report(before, now=True)
            raise
        self._moving(True)
        try:
            unpack(self._state, layout["state"], received)
            self._lineage = at["lineage"]
        except ValueError as error:
            raise RuntimeError(f"{error}; peers of one run need the same model, optimizer and scheduler") from error
        finally:
            self._moving(False)
        self._round_began = time.monotonic()
        self._report(loading=False, now=True)

    # The mean.

    def _meeting(self, samples: float) -> Meeting:
        mine, average_s = self._roster.mine, self._slowest_average_s
        average_s = _FIRST_AVERAGE_S if average_s is None else max(30.0, 5 * average_s)
        key = group_key(mine.round, self._lineage)

        def attempt(members: frozenset[bytes]) -> Attempt:
            return Attempt(key=key, members=members, samples=samples, search_s=_SEARCH_S, average_s=average_s)

        def limit_s() -> float:
            return self._company.patience_s(self._lineage) + 2 * self._options.forget_after_s + 10.0

        return Meeting(
            members=lambda waited_s: self._company.members(self._lineage, waited_s),
            attempt=attempt,
            in_step=lambda: not self._roster.view.ahead_of(mine.round, self._lineage),
            refresh=lambda: self._roster.look(self._options.forget_after_s),
            limit_s=limit_s,
        )
