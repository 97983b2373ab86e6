"""`hivemind.Optimizer` with the native averager, among peers that are threads of this process.

The reference is PyTorch on the pooled batch: one process, the same samples, one backward pass a round.
"""

import itertools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    import hivemind
    from hivemind.compression import Float16Compression, Quantile8BitQuantization, Uniform8BitQuantization
    from hivemind.optim.progress_tracker import ProgressTracker
    from hivemind.utils.crypto import RSAPrivateKey

    from bareloop.swarm.averager import NativeAverager, _Patience, hivemind_defaults, native_averager

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:path is deprecated. Use files:DeprecationWarning"),  # how it finds its daemon
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*interior-point:DeprecationWarning"),  # of hivemind's load balancing
]

LIMIT_S = 90
"""Ends a test that hangs."""

SIZES = ((3, 5, 8), (4, 2), (7,), (1, 2, 3))
"""Of the micro-batches of each peer, over and over."""

Batch = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def endless(peer: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(peer)
    for size in itertools.cycle(SIZES[peer]):
        yield torch.randn(size, 6, generator=generator), torch.randn(size, 2, generator=generator)


def pooled(batches: list[Batch]) -> Batch:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


class Recording(torch.optim.SGD):
    """SGD that keeps the gradients it was given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.seen: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        super().step(closure)


def distance(found: Any, wanted: Any) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def mean_distance(found: Any, wanted: Any) -> float:
    """Of the elements. For 8 bits, which put the values beyond three standard deviations of a tensor into one bin: how far
    that takes a single one off depends on the batches that a round happens to have (0.0001 to 0.01), the mean is below 2e-4;
    micro-batches weighted alike give 2e-3 and more, one lost of 20 to 60 gives 1e-3 and more."""
    found, wanted = list(found), list(wanted)
    return sum((a - b).abs().sum().item() for a, b in zip(found, wanted, strict=True)) / sum(a.numel() for a in found)


@contextmanager
def nodes(count: int) -> Iterator[list[hivemind.DHT]]:
    options: dict[str, Any] = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "use_ipfs": False, "start": True}
    started = [hivemind.DHT(**options)]
    address = [str(address) for address in started[0].get_visible_maddrs()]
    try:
        while len(started) < count:
            started.append(hivemind.DHT(initial_peers=address, **options))
        yield started
    finally:
        for node in started:
            node.shutdown()


@contextmanager
def optimizer(node: hivemind.DHT, model: nn.Module, **options: Any) -> Iterator[hivemind.Optimizer]:
    chosen = {
        **hivemind_defaults(),
        "dht": node,
        "run_id": "run",
        "target_batch_size": 40,
        "params": model.parameters(),
        "optimizer": Recording,
        **options,
    }
    # One process has one key by default, and its trackers would be one peer.
    chosen["tracker_opts"] = {**chosen["tracker_opts"], "min_refresh_period": 0.1, "private_key": RSAPrivateKey()}
    made = hivemind.Optimizer(**chosen)
    try:
        yield made
    finally:
        made.shutdown()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.02)


def know_each_other(optimizers: list[hivemind.Optimizer], count: int) -> None:
    """Waits until all see all; a peer that has no samples yet does not show itself."""
    for one in optimizers:
        one.tracker.report_local_progress(0, 1)
    until(lambda: all(one.tracker.global_progress.num_peers == count for one in optimizers))


def micro_step(one: hivemind.Optimizer, model: nn.Module, batch: Batch, block: bool) -> None:
    one.zero_grad()
    if block:
        with one.grad_averager.micro_batch(len(batch[0])):
            loss(model, batch).backward()
    else:
        loss(model, batch).backward()
    one.step(batch_size=len(batch[0]))


def train(
    one: hivemind.Optimizer, model: nn.Module, peer: int, rounds: int, block: bool, together: threading.Barrier
) -> Any:
    """The batches of each round, as this peer made them."""
    source = endless(peer)
    made = []
    for epoch in range(rounds):
        mine = []
        while one.local_epoch == epoch:
            mine.append(next(source))
            micro_step(one, model, mine[-1], block)
            time.sleep(0.05)  # so that a round holds a few of each peer's
        one.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
        made.append(mine)
        together.wait()
    return made


def one_process(rounds: list[list[Batch]]) -> nn.Module:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batches in rounds:
        plain.zero_grad()
        loss(model, pooled(batches)).backward()
        plain.step()
    return model


@pytest.mark.parametrize(
    ("options", "measure", "tolerance"),
    [
        pytest.param({}, distance, 1e-6, id="blocks"),
        pytest.param(
            {
                "grad_averager_factory": native_averager(compat=True),
                "delay_optimizer_step": True,
                "delay_grad_averaging": True,
                "grad_compression": Float16Compression(),
            },
            distance,
            1e-3,
            id="compat-delayed-fp16",
        ),
        pytest.param(
            {"offload_optimizer": False, "grad_compression": Uniform8BitQuantization()}, mean_distance, 1e-3, id="8bit"
        ),
    ],
)
def test_two_peers_train_as_one_process(
    options: dict[str, Any], measure: Callable[[Any, Any], float], tolerance: float
) -> None:
    models = [network(), network()]
    with ExitStack() as stack:
        started = stack.enter_context(nodes(2))
        peers = [stack.enter_context(optimizer(*pair, **options)) for pair in zip(started, models, strict=True)]
        know_each_other(peers, 2)
        together = threading.Barrier(2, timeout=LIMIT_S)
        made: list[Any] = [None, None]

        def peer(index: int) -> None:
            try:
                block = "grad_averager_factory" not in options
                made[index] = train(peers[index], models[index], index, 3, block, together)
            except BaseException:
                together.abort()
                raise

        threads = [threading.Thread(target=peer, args=[index], daemon=True) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert None not in made
    wanted = one_process([mine + other for mine, other in zip(*made, strict=True)])
    start = network()
    assert measure(start.parameters(), wanted.parameters()) > 3 * tolerance
    for model in models:
        assert measure(model.parameters(), wanted.parameters()) < tolerance


def test_four_peers_have_the_pooled_gradient() -> None:
    with nodes(4) as started:
        models = [network() for _ in started]
        averagers = [
            NativeAverager(
                model.parameters(), dht=node, prefix="four", min_matchmaking_time=2.0, target_group_size=4, start=True
            )
            for node, model in zip(started, models, strict=True)
        ]
        everything = []
        for peer, (averager, model) in enumerate(zip(averagers, models, strict=True)):
            for batch in itertools.islice(endless(peer), len(SIZES[peer])):
                with averager.micro_batch(len(batch[0])):
                    loss(model, batch).backward()
                averager.accumulate_grads_(len(batch[0]))
                everything.append(batch)
        steps = [averager.step(wait=False, timeout=LIMIT_S) for averager in averagers]
        assert [len(step.result(LIMIT_S)) for step in steps] == [4] * 4
        wanted = network()
        loss(wanted, pooled(everything)).backward()
        for averager in averagers:
            with averager.use_averaged_gradients() as found:
                assert distance(found, [p.grad for p in wanted.parameters()]) < 1e-6
            averager.shutdown()


@pytest.mark.parametrize("offload", [True, False])
def test_a_failed_round_applies_this_peers_own_mean(offload: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A second peer is listed, and never comes. Upstream's gradient is zero here."""
    model = network()
    with nodes(2) as (first, second), optimizer(first, model, offload_optimizer=offload, averaging_timeout=4.0) as one:
        ghost = ProgressTracker(second, "run", 40, private_key=RSAPrivateKey(), start=True)
        ghost.report_local_progress(0, 1)
        know_each_other([one], 2)
        made = []
        with caplog.at_level(logging.WARNING, "bareloop.swarm.averager"):
            source = endless(0)
            while one.local_epoch == 0:
                made.append(next(source))
                micro_step(one, model, made[-1], True)
        assert f"own mean, over its {len(pooled(made)[0])} samples" in caplog.text
        wanted = network()
        loss(wanted, pooled(made)).backward()
        assert distance(one.opt.seen[-1], [p.grad for p in wanted.parameters()]) < 1e-6
        moved = one_process([made])
        assert distance(model.parameters(), moved.parameters()) < 1e-6
        ghost.shutdown(1)


def test_hiveminds_scaler_steps_as_one_process() -> None:
    model = network()
    rounds = []
    with nodes(1) as (node,), optimizer(node, model, reuse_grad_buffers=True, batch_size_per_step=7) as one:
        scaler = hivemind.GradScaler("cpu", init_scale=1024.0)
        source = endless(2)
        for epoch in range(2):
            mine = []
            while one.local_epoch == epoch:
                mine.append(next(source))
                scaler.scale(loss(model, mine[-1])).backward()
                scaler.unscale_(one)
                scaler.step(one)
                scaler.update()
            rounds.append(mine)
        with pytest.raises(ValueError, match="reuse_grad_buffers"):
            one.zero_grad()
    assert distance(model.parameters(), one_process(rounds).parameters()) < 1e-6


def test_sizes_that_contradict_are_refused_and_clipping_has_a_way() -> None:
    model = network()

    def clip(chosen: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in chosen.param_groups for p in group["params"]], 0.01)

    def clipped(parameters: Any) -> torch.optim.Optimizer:
        made = Recording(parameters)
        made.register_step_pre_hook(clip)
        return made

    with nodes(1) as (node,), optimizer(node, model, optimizer=clipped, target_batch_size=16) as one:
        source = endless(0)
        batch = next(source)
        with one.grad_averager.micro_batch(3):
            loss(model, batch).backward()
        with pytest.raises(ValueError, match=r"give opt.step\(batch_size=3\)"):
            one.step(batch_size=5)
        one.step(batch_size=3)
        loss(model, next(source)).backward()
        with pytest.raises(ValueError, match="micro-batches of 3"):
            one.step(batch_size=5)
        assert one.grad_averager.local_samples_accumulated == 0
        with pytest.raises(RuntimeError, match="register_step_pre_hook"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        while one.local_epoch == 0:
            micro_step(one, model, next(source), True)
        assert torch.cat([g.flatten() for g in one.opt.seen[-1]]).norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grads_on": torch.device("cpu")}, "accumulate_grads_on"),
        ({"averaged_grads": [torch.zeros(1)]}, "averaged_grads"),
        ({"averager_rank": 4}, "PowerSGD"),
        ({"compat": True, "reuse_grad_buffers": True}, "reuse_grad_buffers"),
        ({"compression": Quantile8BitQuantization()}, "Quantile8BitQuantization"),
        ({"compression": Uniform8BitQuantization(), "parameters": nn.Linear(3, 1).parameters()}, "one element"),
        ({"parameters": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]}, "float64"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NativeAverager(
            **{"parameters": network().parameters(), "dht": None, "prefix": "refused", "start": False, **options}
        )


def test_patience_follows_what_rounds_take() -> None:
    patience = _Patience(least_s=4.0)
    assert patience.limit_s is None
    patience.took(0.1)
    assert patience.limit_s == 4.0
    for _ in range(50):
        patience.took(10.0)
    assert patience.limit_s == pytest.approx(30.0, rel=0.01)


def test_a_round_that_takes_too_long_is_given_up() -> None:
    class Control:
        def __init__(self) -> None:
            self.cancelled = threading.Event()

        def done(self) -> bool:
            return self.cancelled.is_set()

        def cancel(self) -> None:
            self.cancelled.set()

    patience = _Patience(least_s=0.01)
    control: Any = Control()
    patience.took(0.001)
    patience.watch(control)
    assert control.cancelled.wait(LIMIT_S)
    assert patience.limit_s == pytest.approx(0.02)
    patience.took(0.001)
    assert patience.limit_s == pytest.approx(0.01)


@pytest.mark.parametrize("transfer_s", [0, -1.0, float("nan")])
def test_defaults_refuse_times_that_are_none(transfer_s: float) -> None:
    with pytest.raises(ValueError, match="transfer_s"):
        hivemind_defaults(transfer_s=transfer_s)
