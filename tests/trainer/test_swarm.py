"""A trainer in a swarm, against gradient accumulation in transformers' own trainer and against training in one process."""

import argparse
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forked import two_ranks
from small_runs import Lines, gpt2, run, stack, trainer
from swarm_runs import EXACT, Notes, one_process, without_dropout
from torch import Tensor
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))
from in_process import InProcessEngine, Meeting, threads

from bareloop.swarm.door import Swarm
from bareloop.trainer.hf import Trainer, lean

pytestmark = pytest.mark.usefixtures("frozen_heap")
ROUNDS = 5


def peer(target: float, meeting: Meeting | None = None) -> Swarm:
    meeting = Meeting(target) if meeting is None else meeting
    return Swarm(InProcessEngine(meeting), run_id="run", target_batch=target)


def in_swarm(folder: Path, swarm: Swarm, *, callback: Any = None, resume: Any = None, **settings: Any) -> Any:
    defaults = {"gradient_accumulation_steps": 1, "max_steps": ROUNDS, "save_strategy": "no"}
    made = trainer(folder, cls=_with(swarm, settings.pop("cls", Trainer)), **(defaults | settings))
    if callback is not None:
        made.add_callback(callback)
    made.train(resume_from_checkpoint=resume)
    return made


def _with(swarm: Swarm, cls: type) -> Callable[..., Any]:
    return lambda **arguments: cls(swarm=swarm, **arguments)


def weights(of: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in of.model.state_dict().values()]


def distance(one: Any, other: Any) -> float:
    pairs = zip(weights(one), weights(other), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def losses(of: Any, key: str = "loss") -> list[float]:
    return [line[key] for line in of.state.log_history if key in line]


@pytest.mark.parametrize(("accumulate", "to_the_bit"), [(1, True), (2, True), (3, False), (4, True)])
def test_one_peer_trains_as_gradient_accumulation_does(accumulate: int, to_the_bit: bool, tmp_path: Path) -> None:
    """Micro-batches of one size; no epoch of the reference ends in a window that is cut short."""
    settings: dict[str, Any] = {"max_steps": ROUNDS, "save_strategy": "no", "max_grad_norm": 0.5}
    settings |= {} if to_the_bit else EXACT
    stock = run(tmp_path / "stock", cls=transformers.Trainer, gradient_accumulation_steps=accumulate, **settings)
    ours = in_swarm(tmp_path / "ours", peer(2 * accumulate), **settings)
    assert len(losses(stock)) == ROUNDS
    for key in ("loss", "grad_norm", "learning_rate", "epoch"):
        if to_the_bit:
            assert losses(ours, key) == losses(stock, key), key
        else:
            assert losses(ours, key) == pytest.approx(losses(stock, key), rel=1e-5), key
    assert distance(ours, stock) <= (0 if to_the_bit else 1e-6)
    assert ours.state.global_step == ROUNDS
    assert ours.lr_scheduler.last_epoch == ROUNDS


def test_labels_weigh_micro_batches_as_gradient_accumulation_does(tmp_path: Path) -> None:
    """Rows whose counted labels differ; the target is the number of labels in the reference's only step."""
    counted: list[int] = []

    def uneven(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = stack(samples)
        labels = batch["labels"].clone()
        labels[:, : 12 if int(labels[0, 0]) % 2 else 3] = -100
        return batch | {"labels": labels}

    def note(model: Any, arguments: Any, named: dict[str, Any]) -> None:
        counted.append(int((named["labels"][:, 1:] != -100).sum()))

    settings: dict[str, Any] = {"collate": uneven, "max_steps": 1, "save_strategy": "no", **EXACT}
    model = gpt2()
    model.register_forward_pre_hook(note, with_kwargs=True)
    stock = run(tmp_path / "stock", cls=transformers.Trainer, model=model, gradient_accumulation_steps=6, **settings)
    assert len(counted) == 6 and len(set(counted)) > 1
    ours = in_swarm(tmp_path / "ours", peer(sum(counted)), options={"swarm_counts": "labels"}, **settings)
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    assert distance(ours, stock) < 1e-6
    assert losses(ours, "samples") == [sum(counted)]


def test_two_peers_train_as_one_process_that_has_all_their_rows(tmp_path: Path) -> None:
    """Each thread's trainer has its own order of the rows and brings as many to a round as it comes to."""
    meeting, notes = Meeting(12, peers=2), [Notes(), Notes()]
    peers = []
    for number in range(2):
        made = trainer(
            tmp_path / str(number),
            cls=_with(peer(12, meeting), Trainer),
            model=without_dropout(),
            gradient_accumulation_steps=1,
            max_steps=ROUNDS,
            save_strategy="no",
            seed=number,
            max_grad_norm=0.5,
            **EXACT,
        )
        notes[number].watch(made)
        peers.append(made)
    threads(*(each.train for each in peers))
    rounds = [torch.cat([*notes[0].steps[index], *notes[1].steps[index]]) for index in range(ROUNDS)]
    assert all(notes[number].steps[index] for number in range(2) for index in range(ROUNDS)), "both in every round"
    assert losses(peers[0], "samples") == losses(peers[1], "samples") == [len(rows) for rows in rounds]
    reference = one_process(tmp_path / "reference", rounds, max_grad_norm=0.5, **EXACT)
    assert distance(peers[0], peers[1]) == 0
    assert distance(peers[0], reference) < 2e-6


class Events(TrainerCallback):
    """Writes down (event, step) and what a log says."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.logs: list[dict[str, Any]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("begin", state.global_step))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("substep", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_events_logs_and_rounds_that_go_on_over_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Four micro-batches an epoch, three a round, and an average that fails once."""
    meeting, events = Meeting(6), Events()
    meeting.failures = 1
    with caplog.at_level(logging.WARNING, "bareloop"):
        made = in_swarm(tmp_path, peer(6, meeting), callback=events, data=Lines(8), max_steps=3)
    first = [("begin", 0), ("substep", 0), ("substep", 0), ("substep", 0), ("end", 1)]
    others = [
        each for step in (1, 2) for each in (("begin", step), ("substep", step), ("substep", step), ("end", step + 1))
    ]
    assert events.seen == first + others
    logs = [line for line in events.logs if "loss" in line]
    assert [line["samples"] for line in logs] == [8, 6, 6]
    assert all(line["peers"] == 1 and line["round_s"] > 0 and line["local_samples_per_s"] > 0 for line in logs)
    assert made.state.epoch == 2.5
    assert made._swarm.status.failures == 1
    assert "swarm_counts='labels'" in caplog.text
    summary = made.state.log_history[-1]
    assert summary["train_samples_per_second"] * summary["train_runtime"] == pytest.approx(20, rel=0.05)
    assert all(parameter.grad is None for parameter in made.model.parameters()), "the trainer has left the swarm"


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """One peer alone: to the bit as the run that was not stopped, data and dropout included."""
    whole = in_swarm(tmp_path / "whole", peer(6), max_steps=6, save_strategy="steps", save_steps=3)
    folder = tmp_path / "whole" / "checkpoint-3"
    saved = json.loads((folder / "swarm_state.json").read_text())
    assert saved["peer"]["round"] == 3 and saved["position"] == {"epoch": 0, "trained": 9}
    resumed = in_swarm(tmp_path / "resumed", peer(6), max_steps=6, resume=str(folder))
    assert distance(resumed, whole) == 0
    assert losses(resumed) == losses(whole)
    assert resumed._swarm.round == 6


def test_a_resumed_run_goes_on_with_the_loaders_own_state(tmp_path: Path) -> None:
    options = {"stateful_loader": True}
    whole = in_swarm(tmp_path / "whole", peer(6), max_steps=6, save_strategy="steps", save_steps=3, options=options)
    folder = str(tmp_path / "whole" / "checkpoint-3")
    resumed = in_swarm(tmp_path / "resumed", peer(6), max_steps=6, resume=folder, options=options)
    assert distance(resumed, whole) == 0


def test_a_late_peer_goes_on_at_the_round_of_the_others(tmp_path: Path) -> None:
    """It has their parameters and learning rate, stops with them, and logs its own rounds only."""
    meeting = Meeting(4)
    first = in_swarm(tmp_path / "first", peer(4, meeting), max_steps=4)
    late = in_swarm(tmp_path / "late", peer(4, meeting), max_steps=6)
    assert [line["step"] for line in late.state.log_history if "loss" in line] == [5, 6]
    assert late.lr_scheduler.last_epoch == 6
    assert 3.5 < late.state.log_history[-1]["train_loss"] < 5, "of its own two rounds"
    after = in_swarm(tmp_path / "after", peer(4, meeting), max_steps=6)
    assert after.state.global_step == 6
    assert distance(after, late) == 0
    assert distance(first, late) > 0
    behind = in_swarm(tmp_path / "behind", peer(4, meeting), max_steps=7, data=Lines(8))
    assert behind.state.global_step == 7


def test_a_peer_left_behind_in_mid_run_follows(tmp_path: Path) -> None:
    meeting = Meeting(4)
    swarm = peer(4, meeting)

    class Others(TrainerCallback):
        """Makes rounds of its own while the trainer is in the middle of one."""

        def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 1 and not meeting.round > 1:
                states = [part.state_dict() for part in (model, kwargs["optimizer"].optimizer, kwargs["lr_scheduler"])]
                meeting.round, meeting.snapshot = 4, states

    made = in_swarm(tmp_path, swarm, callback=Others(), max_steps=6)
    assert [line["step"] for line in made.state.log_history if "loss" in line] == [1, 5, 6]
    assert made._swarm.status.lost_samples == 4
    assert all(4 < loss < 5 for loss in losses(made)), "each of one round, from about log(128) on"
    assert 4 < made.state.log_history[-1]["train_loss"] < 5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "accumulation": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
    "epochs": ({"max_steps": -1}, "max_steps=-1"),
    "fp16": ({"fp16": True}, "fp16=True"),
    "batch size": ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    "epoch saves": ({"save_strategy": "epoch"}, "save_strategy='epoch'"),
    "plateau": ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "reduce_lr_on_plateau"),
    "shrink": ({"options": {"shrink_on_out_of_memory": True}}, "shrink_on_out_of_memory"),
    "stock loop": ({"torch_empty_cache_steps": 3}, "torch_empty_cache_steps"),
    "lomo": ({"optim": "lomo"}, "steps in backward"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_swarm_does_not_support_is_refused_by_name(case: str, tmp_path: Path) -> None:
    settings, named = REFUSED[case]
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 1, "save_strategy": "no", **settings}
    with pytest.raises(ValueError) as refusal:
        trainer(tmp_path, cls=_with(peer(4), Trainer), **arguments)
    assert named in str(refusal.value)


class OwnLoop(transformers.Trainer):
    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        return super()._inner_training_loop(*arguments, **named)


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(16, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.line(input_ids.float()).pow(2).mean()}


def test_refusals_that_are_not_of_the_arguments(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 1, "save_strategy": "no"}
    with pytest.raises(ValueError, match="_inner_training_loop is overridden by OwnLoop"):
        trainer(tmp_path, cls=_with(peer(4), lean(OwnLoop)), **settings)
    with pytest.raises(ValueError, match=r"bareloop\.swarm\.join"):
        trainer(tmp_path, cls=_with("my-run", Trainer), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="swarm_counts='labels'"):
        trainer(
            tmp_path, cls=_with(peer(4), Trainer), model=Regression(), options={"swarm_counts": "labels"}, **settings
        )
    with pytest.raises(ValueError, match="without a swarm"):
        trainer(tmp_path, options={"swarm_counts": "labels"})
    with pytest.raises(ValueError, match="swarm_counts='tokens'"):
        trainer(tmp_path, options={"swarm_counts": "tokens"})
    made = trainer(tmp_path, cls=_with(peer(4), Trainer), **settings)
    made.args.torch_empty_cache_steps = 1  # changed after it was built: still not the stock loop
    with pytest.raises(ValueError, match="torch_empty_cache_steps"):
        made.train()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # TRL sets it
def test_trl_trains_in_a_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTTrainer with rounds of one micro-batch, against itself without a swarm: to the bit."""
    monkeypatch.setenv("CI", "1")  # TRL sends nothing home then
    import trl

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    known = set(sys.modules)
    try:
        import sft_task as task

        options = argparse.Namespace(layers=1, width=32, lora=True)
        made = [_supervised(tmp_path, trl, task, options, swarm) for swarm in (None, peer(2))]
    finally:
        for name in {"sft_task", "corpus"} - known:
            sys.modules.pop(name, None)
    assert distance(*made) == 0
    assert losses(made[0]) == losses(made[1]) and len(losses(made[0])) == 3
    assert losses(made[1], "samples") == [2, 2, 2]


def _supervised(folder: Path, trl: Any, task: Any, options: argparse.Namespace, swarm: Any) -> Any:
    args = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=3,
        max_length=64,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    made = lean(trl.SFTTrainer)(
        model=task.llama(options),
        args=args,
        train_dataset=task.rows().select(range(24)),
        processing_class=task.tokenizer(),
        peft_config=task.adapters(options),
        swarm=swarm,  # type: ignore[call-arg]
    )
    made.train()
    return made


def test_two_ranks_are_one_peer(tmp_path: Path) -> None:
    """Each rank's rows are one half: as gradient accumulation on two ranks without a swarm."""

    def both() -> None:
        settings: dict[str, Any] = {"max_steps": 3, "save_strategy": "no", "max_grad_norm": 0.5, **EXACT}
        settings |= {"disable_tqdm": True, "data": Lines(32), "ddp_backend": "gloo", "model": without_dropout()}
        stock = run(tmp_path / "stock", cls=transformers.Trainer, gradient_accumulation_steps=2, **settings)
        settings["model"] = without_dropout()
        ours = in_swarm(tmp_path / "ours", peer(8), **settings)
        assert losses(ours, "loss") == pytest.approx(losses(stock, "loss"), rel=1e-5)
        assert distance(ours, stock) < 1e-6
        assert ours.state.global_step == 3
        if ours.args.process_index == 0:
            assert losses(ours, "samples") == [8, 8, 8]

    two_ranks(both, tmp_path)
