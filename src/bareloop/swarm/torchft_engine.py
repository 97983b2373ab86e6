"""A swarm on torchft: peers of a cluster that come, go and die, with one lighthouse that says who is there.

A round is a few micro-batches without a word to anyone, one question to all (a quorum and a sum of six numbers a peer: 5 ms
on one machine, and the wait for the slowest one's micro-batch), and the sum of the gradients. torchft's Manager gives the
quorum, the process group and the count of commits; its DDP wrapper, which crashes a survivor on gloo, is not used, nor are
its states by pickle. With `LIGHTHOUSE_DEFAULTS` the survivors of a killed peer step again within 2 s, and lose no sample.

What can go wrong with one mean: a peer dies in it, then all see the sum fail, none commits, and the gradients are summed
again with those who are left. Or it dies so late that some have the sum and some have not: those who have it apply it, with
the samples of all in it, and the others download their state. No sample counts twice, none of a survivor is lost.

The global batch is constant: `target_batch` or more, by less than one micro-batch a peer, and by one more for each attempt
that failed. What is waited for is a barrier: the slowest peer's micro-batch at the most. In the plan of `torchft_pace` a
slow peer makes fewer micro-batches in the same time; a peer whose one micro-batch takes longer than a round of all others
makes every round that long.
"""

import logging
import time
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bareloop.swarm.addresses import checked, host_and_port, lighthouse
from bareloop.swarm.engine import RoundFailed, StateReplaced, TrainingState
from bareloop.swarm.state import pack, schema, unpack
from bareloop.swarm.torchft_census import COLUMNS, Census, Row
from bareloop.swarm.torchft_group import Membership
from bareloop.swarm.torchft_options import LIGHTHOUSE_DEFAULTS, TorchFTOptions, require_answer
from bareloop.swarm.torchft_pace import PaceMeter, plan
from bareloop.swarm.torchft_records import Publisher, records_address

__all__ = ["LIGHTHOUSE_DEFAULTS", "TorchFTEngine", "TorchFTOptions"]

_QUORUM_S = 60.0
"""Longer than the join timeout, and than a peer's part of the plan takes longer than that of another."""

_log = logging.getLogger(__name__)


class TorchFTEngine:
    """An `Engine`: this peer's membership in a run that torchft keeps together.

    Args:
        run_id: the run's name; one lighthouse serves one run.
        target_batch: samples of all peers that make a round.
        peers: the lighthouse's address, ["HOST:PORT"].
        options: None takes the defaults.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self, run_id: str, target_batch: float, peers: Sequence[str], options: TorchFTOptions | None = None
    ) -> None:
        if not run_id:
            raise ValueError(f"run_id={run_id!r}: must be a name, the same for all peers")
        if not target_batch > 0:
            raise ValueError(f"target_batch={target_batch!r}: must be a number of samples above 0")
        self._lighthouse = lighthouse(checked("torchft", peers))
        self._run_id = run_id
        self._target = target_batch
        self._options = TorchFTOptions() if options is None else options
        self._member: Membership | None = None
        self._publisher: Publisher | None = None
        self._meter = PaceMeter()
        self._round = 0
        self._samples = 0.0
        self._heard = 0.0
        """Samples of the others at the last census."""
        self._census: Census | None = None
        self._may_average = False
        """All have agreed to, and wait for this peer in the sum."""
        self._unapplied = False
        """A mean was given out, of which the caller has not said that it stepped on it."""

    @property
    def round(self) -> int:
        """Means that the run has applied since it began."""
        return self._round

    @property
    def peers(self) -> int:
        """Peers at the last census."""
        return 0 if self._census is None else len(self._census.rows)

    @property
    def global_samples(self) -> float:
        """This peer's samples, and those of the others at the last census."""
        return self._heard + self._samples

    def start(self, state: TrainingState, buffers: Sequence[Tensor], *, round: int = 0) -> None:
        """Joins the run, which peers let in between two rounds of theirs; returns with the state of those who are furthest.

        Peers that all begin at round 0 begin with the state of one of them.

        Raises:
            RuntimeError: no lighthouse answers; the others train another model, or for another target; nobody came in time.
            ValueError: optimizer or scheduler keep what can't be sent without pickle.
        """
        self._state, self._buffers = state, buffers
        pack(TrainingState(model=nn.Module(), optimizer=state.optimizer, scheduler=state.scheduler))
        self._run, self._setup = _fingerprints(self._run_id, self._target, state)
        host, port = self._lighthouse
        options = self._options
        require_answer(host, port, options.connect_timeout_s)
        self._member = Membership(
            host_and_port(host, port),
            options.host,
            buffers[0].device,
            silence_s=options.silence_timeout_s,
            connect_s=options.connect_timeout_s,
        )
        self._member.step = self._steps_of(round)
        self._publisher = Publisher(records_address(host.strip("[]"), port), self._run_id)
        self._enter(time.monotonic() + options.start_timeout_s)
        self._set_round()
        self._meter.follow(1, 0.0)
        self._meter.resume()

    def ready(self, samples: float) -> bool:
        """Whether to average now; asks the others only when this peer has done its part of the plan.

        Raises:
            StateReplaced: the others had gone on; their state was loaded.
            RuntimeError: their state does not fit; the engine was not started, or closed.
        """
        self._withdraw_unapplied()
        self._samples = samples
        self._meter.count(samples)
        if self._may_average:
            return True
        if not self._meter.is_due:
            return False
        try:
            self._may_average = self._agree(samples)
        finally:
            self._meter.resume()
        return self._may_average

    def average(self, buffers: Sequence[Tensor], samples: float) -> float:
        """Turns this peer's mean in `buffers` into that of all peers, in place; returns the samples of all.

        Raises:
            RoundFailed: somebody died, or the peers have not agreed to average; `buffers` are as they were.
            StateReplaced: as for `ready`.
        """
        member = self._joined()
        if not self._may_average and not self.ready(samples):
            raise RoundFailed(f"the peers have {self.global_samples:g} of {self._target:g} samples")
        self._may_average = False
        try:
            total, sums = self._summed(buffers, samples)
            if total and not member.commit():
                raise RuntimeError("torchft refused the commit")
        except Exception as error:
            self._give_up("the mean", error)
            raise RoundFailed(f"a peer left while the gradients were summed: {error}") from error
        if not total:
            raise RoundFailed("no peer has a gradient that is finite")
        for buffer, whole in zip(buffers, sums, strict=True):
            buffer.copy_(whole)
        self._unapplied = True
        self._meter.resume()
        return total

    def applied(self) -> None:
        """The round is over; the plan of the next one follows from the last census."""
        self._unapplied = False
        self._set_round()
        self._begin_round()
        if self._census is not None:
            counts, seconds = plan(self._census.paces(), self._target, least=1)
            self._meter.follow(counts[self._census.me], seconds)
        self._meter.resume()

    def publish(self, record: str) -> None:
        """Shows `record` to `bareloop swarm watch`, where the lighthouse was started by `bareloop swarm serve`."""
        if self._publisher is not None:
            self._publisher.publish(record)

    def close(self) -> None:
        """Leaves. The others notice when they next ask each other: torchft has no message for it, so that they wait for the
        heartbeat timeout once."""
        member, self._member = self._member, None
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
        if member is not None:
            member.close()

    def _joined(self) -> Membership:
        if self._member is None:
            raise RuntimeError(f"this peer is no member of run {self._run_id!r}: not started, or closed")
        return self._member

    def _enter(self, deadline: float) -> None:
        """Until this peer has the run's state."""
        member = self._joined()
        while time.monotonic() < deadline:
            census = self._ask(0.0, quorum_s=min(_QUORUM_S, deadline - time.monotonic()), entering=True)
            if census is not None and census.is_foreign(census.me):
                raise RuntimeError(self._foreign(census))
            stage = "retry" if census is None else census.stage(self._target)
            if census is None or stage in ("retry", "wait"):
                time.sleep(0.1)
            elif stage == "found" and self._hand_over(census):
                member.step = max(1, member.step)
                return
            elif stage == "go" or (stage == "transfer" and self._hand_over(census)):
                return
            elif stage == "average":
                self._watch_average()
        raise RuntimeError(
            f"run {self._run_id!r} could not be joined in {self._options.start_timeout_s:g} s: of min_peers="
            f"{self._options.min_peers} there were {self.peers}, or their round takes longer than start_timeout_s"
        )

    def _agree(self, samples: float) -> bool:
        """Asks the others, until all go to average or this peer has a micro-batch to do."""
        waited = False
        while True:
            census = self._ask(samples)
            stage = "retry" if census is None else census.stage(self._target)
            if census is None or stage in ("retry", "wait", "found"):
                self._meter.follow(1, 0.0)
                return False
            if census.is_behind(census.me):
                self._catch_up(census, stage)
            if stage == "average":
                return True
            if stage == "transfer":
                self._hand_over(census)
            counts, seconds = plan(census.paces(), self._target - census.samples, least=0)
            self._meter.follow(max(1, counts[census.me]), seconds)
            if counts[census.me] or waited:
                return False
            # The others have the missing samples before this peer had one micro-batch: better it waits than they. But once
            # only: they may not keep what their pace promised.
            time.sleep(seconds)
            waited = True

    def _ask(self, samples: float, *, quorum_s: float = _QUORUM_S, entering: bool = False) -> Census | None:
        """What all peers say of themselves; None where some could not be heard."""
        member = self._joined()
        try:
            me, size = member.quorum(quorum_s)
            table = torch.zeros(size, len(COLUMNS), dtype=torch.float64, device=member.device)
            pace = self._meter.pace
            row = Row(
                run=self._run,
                setup=self._setup,
                step=member.step,
                entering=float(entering),
                min_peers=float(self._options.min_peers),
                samples=samples,
                size=pace.size,
                seconds=pace.seconds,
            )
            table[me] = torch.tensor(row.numbers(), dtype=torch.float64)
            member.sum(table)
        except Exception as error:
            self._give_up("a question to all peers", error)
            return None
        self._census = census = Census.of(table.tolist(), me)
        self._heard = census.samples - samples if not census.is_behind(me) else census.samples
        return census

    def _summed(self, buffers: Sequence[Tensor], samples: float) -> tuple[float, list[Tensor]]:
        """Samples of all peers, and the mean over them in tensors of its own."""
        member = self._joined()
        count = torch.tensor([samples], dtype=torch.float64, device=member.device)
        member.sum(count)
        total = count.item()
        sums = [buffer * (samples / total if total else 0.0) for buffer in buffers]
        for part in sums:
            member.sum(part)
        return total, sums

    def _watch_average(self) -> None:
        """Takes part in a mean that is not for this peer, with nothing: the others wait for all members of the quorum."""
        try:
            self._summed([torch.zeros_like(buffer) for buffer in self._buffers], 0.0)
        except Exception as error:
            self._give_up("the mean", error)

    def _catch_up(self, census: Census, stage: str) -> None:
        """Takes over the state of those who are further.

        Raises:
            StateReplaced: always, but for RuntimeError where it does not fit.
        """
        if stage == "average":
            self._watch_average()
        if stage == "average" or not self._hand_over(census):
            self._enter(time.monotonic() + self._options.start_timeout_s)
        self._set_round()
        self._begin_round()
        self._meter.follow(1, 0.0)
        raise StateReplaced(f"the others were at round {self._round}: their state was loaded")

    def _hand_over(self, census: Census) -> bool:
        """Gives this peer's state to those who get it from here, or takes what it gets; whether all went well."""
        member = self._joined()
        try:
            receivers = census.receivers(census.me)
            donor = census.donor(census.me)
            if receivers:
                member.send(*pack(self._state), receivers)
            if donor is not None:
                unpack(self._state, *member.receive(donor, first_s=self._options.state_timeout_s))
                member.step = max(1, census.top)
        except ValueError as error:
            raise RuntimeError(f"run {self._run_id!r}: {error}") from error
        except Exception as error:
            self._give_up("the state", error)
            return False
        return True

    def _give_up(self, what: str, error: Exception) -> None:
        _log.warning("run %r: %s could not be had, and is tried again: %s", self._run_id, what, error)
        self._joined().give_up(error)
        self._meter.follow(1, 0.0)

    def _withdraw_unapplied(self) -> None:
        """The caller was given the mean and did not step on it: its state is one behind what it has committed."""
        member = self._joined()
        if self._unapplied:
            self._unapplied = False
            member.step -= 1

    def _begin_round(self) -> None:
        self._samples = self._heard = 0.0
        self._meter.begin_round()

    def _steps_of(self, round: int) -> int:
        """torchft's step number: the peers' common beginning is its first commit, so that step 0 is a peer without state."""
        return round + 1 if round else 0

    def _set_round(self) -> None:
        self._round = self._joined().step - 1

    def _foreign(self, census: Census) -> str:
        host, port = self._lighthouse
        if census.runs_differ(census.me):
            return f"the lighthouse at {host_and_port(host, port)} serves another run than {self._run_id!r}: start one for each run"
        return (
            f"the peers of run {self._run_id!r} train another model, optimizer or scheduler, or for another target_batch"
            f" than {self._target:g}: give all peers the same"
        )


def _fingerprints(run_id: str, target: float, state: TrainingState) -> tuple[float, float]:
    """Numbers for the run, and for what its peers must have in common."""
    facts = [
        float(target),
        schema(state.model),
        type(state.optimizer).__name__,
        [len(group["params"]) for group in state.optimizer.param_groups],
        type(state.scheduler).__name__,
    ]
    return float(zlib.crc32(run_id.encode())), float(zlib.crc32(repr(facts).encode()))
