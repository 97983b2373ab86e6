"""Streaming metrics equal the same metrics computed by a stock trainer from every prediction, and hold no more than a batch."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import streaming
import torch
import transformers
from torch import Tensor, nn
from transformers import EvalPrediction, T5Config, T5ForConditionalGeneration
from transformers.utils import ModelOutput

from bareloop.trainer.hf import Trainer, lean
from bareloop.trainer.options import LeanOptions

gc.collect()
gc.freeze()  # accelerate collects garbage in every `train()`, which takes 0.4 s over what is imported


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = []
    for rank in range(2):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        environment = {**os.environ, **{name: str(value) for name, value in ranks.items()}}
        with (folder / f"said_{rank}").open("wb") as said:
            command = [sys.executable, streaming.__file__, str(folder)]
            processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=said))
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join((folder / f"said_{rank}").read_text()[-3000:] for rank in range(2))
    return [json.loads((folder / f"found_{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["sums", "objects"])
@pytest.mark.parametrize("data", streaming.DATA)
def test_metrics_equal_those_of_a_stock_trainer_from_everything(tmp_path: Path, data: str, kind: str) -> None:
    ours = streaming.evaluated(tmp_path, kind, streaming.DATA[data]())
    theirs = streaming.evaluated(tmp_path, f"stock {kind}", streaming.DATA[data]())
    assert ours == pytest.approx(theirs, rel=1e-6) and list(ours) == list(theirs)
    assert ours["eval_loss"] == theirs["eval_loss"]


@pytest.mark.parametrize("kind", ["sums", "objects"])
@pytest.mark.parametrize("data", streaming.DATA)
def test_metrics_equal_those_of_a_stock_trainer_on_two_processes(two_ranks: Any, data: str, kind: str) -> None:
    for found in two_ranks:
        assert found[f"{data}: {kind}"] == pytest.approx(found[f"{data}: stock {kind}"], rel=1e-6)
        assert found[f"{data}: {kind}"]["eval_loss"] == found[f"{data}: stock {kind}"]["eval_loss"]


def test_extra_losses_are_averaged_over_the_processes_that_returned_them(two_ranks: Any) -> None:
    for lines in (found["trained"] for found in two_ranks):
        logs = [line for line in lines if "learning_rate" in line]
        assert [line["only_on_rank_1"] for line in logs] == [1, 3]
        assert all(line["fit"] == pytest.approx(line["loss"], rel=1e-6) for line in logs)


def test_evaluation_within_training_sees_the_metrics_and_best_model(tmp_path: Path) -> None:
    lines = {}
    for kind in ("sums", "stock sums"):
        made = streaming.trainer(
            tmp_path, kind, streaming.Tagger(), streaming.rows(10), eval_strategy="steps", eval_steps=2
        )
        if kind == "stock sums":
            made.model.config = transformers.PretrainedConfig(keys_to_ignore_at_inference=["kinds"])
        made.args.metric_for_best_model = "margin"
        made.args.greater_is_better = True
        made.train()
        lines[kind] = [line for line in made.state.log_history if "eval_margin" in line]
        assert made.state.best_metric == max(line["eval_margin"] for line in lines[kind])
    clock = ("runtime", "per_second")
    for ours, theirs in zip(*lines.values(), strict=True):
        for line in (ours, theirs):
            for name in [name for name in line if name.endswith(clock)]:
                del line[name]
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("kind", ["sums", "objects"])
def test_predict_returns_what_stock_returns_and_the_metrics(tmp_path: Path, kind: str) -> None:
    data = streaming.rows(10)
    ours = streaming.trainer(tmp_path, kind).predict(data)
    theirs = streaming.trainer(tmp_path, f"stock {kind}").predict(data, ignore_keys=["kinds"])
    for mine, other in zip(ours.predictions, theirs.predictions, strict=True):
        assert (mine == other).all()
    assert (ours.label_ids == theirs.label_ids).all()
    names = [name for name in theirs.metrics if "runtime" not in name and "second" not in name and "time" not in name]
    assert {name: ours.metrics[name] for name in names} == pytest.approx({name: theirs.metrics[name] for name in names})


def test_a_second_evaluation_starts_from_nothing_even_after_one_that_failed(tmp_path: Path) -> None:
    made = streaming.trainer(tmp_path, "objects")
    expected = streaming.evaluated(tmp_path, "objects", streaming.rows(10))
    broken = streaming.rows(10)
    broken[9]["input_ids"] = torch.full((5,), 99)
    with pytest.raises(IndexError):
        made.evaluate(broken)
    assert "prediction_step" not in vars(made)
    for _ in range(2):
        found = made.evaluate(streaming.rows(10))
        assert {name: found[name] for name in expected} == expected


def test_several_evaluation_sets_and_preprocessed_logits(tmp_path: Path) -> None:
    def tags(logits: Any, labels: Tensor) -> Tensor:
        return logits[0].argmax(-1)

    def right(batch: EvalPrediction) -> dict[str, Tensor]:
        assert batch.inputs.shape == batch.label_ids.shape == batch.predictions.shape and batch.losses.ndim == 0
        return {"right": (batch.predictions == batch.label_ids).sum(), "labels": (batch.label_ids != -100).sum()}

    made = Trainer(
        streaming.Tagger(states=True),
        streaming.arguments(tmp_path, include_for_metrics=["inputs", "loss"]),
        compute_metrics=lambda total: {"accuracy": total["right"] / total["labels"]},
        preprocess_logits_for_metrics=tags,
        lean_options=LeanOptions(streaming_metrics=right, log_extra_losses=("kinds",)),
    )
    found = made.evaluate({"one": streaming.rows(9), "two": streaming.rows(6)})
    for name, count in (("one", 9), ("two", 6)):
        expected = streaming.evaluated(tmp_path, "stock sums", streaming.rows(count))
        assert found[f"eval_{name}_accuracy"] == pytest.approx(expected["eval_accuracy"])


def test_t5_whose_predictions_are_a_tuple(tmp_path: Path) -> None:
    settings = {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**settings, decoder_start_token_id=0, pad_token_id=0))
    data, args = streaming.rows(10), streaming.arguments(tmp_path)
    stock = transformers.Trainer(model, args, compute_metrics=streaming.from_everything).evaluate(data)
    options = LeanOptions(streaming_metrics=streaming.sums)
    ours = Trainer(model, args, compute_metrics=streaming.from_sums, lean_options=options).evaluate(data)
    objects = Trainer(model, args, lean_options=LeanOptions(streaming_metrics={"tags": streaming.Tags()})).evaluate(
        data
    )
    for name in ("eval_loss", "eval_accuracy", "eval_f1", "eval_margin"):
        assert ours[name] == pytest.approx(stock[name], rel=1e-6)
    assert objects["eval_tags"] == pytest.approx(stock["eval_accuracy"], rel=1e-6)


WIDE = 30_000
"""The vocabulary of the memory test."""


class Wide(nn.Module):
    """Logits over a vocabulary of 30,000, cheaply: looked up. Sees how many samples' logits are alive with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, WIDE), requires_grad=False)
        self.one = nn.Parameter(torch.zeros(()))
        self.batches, self.most_alive = 0, 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.table[input_ids]
        self.batches += 1
        if self.batches % 25 == 0:
            storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is Tensor and each.ndim == 3]
            alive = {each.data_ptr(): each.nbytes() for each in storages}
            self.most_alive = max(self.most_alive, sum(alive.values()) // (2 * WIDE * 4))
        return ModelOutput(loss=self.one, logits=logits)


def counts(batch: EvalPrediction) -> dict[str, Any]:
    return {"right": (torch.as_tensor(batch.predictions).argmax(-1) == 0).sum(), "tokens": 2 * len(batch.predictions)}


def share(found: Any) -> dict[str, float]:
    """Of all predictions (stock) or of their sums."""
    total = counts(found) if isinstance(found, EvalPrediction) else found
    return {"accuracy": float(total["right"] / total["tokens"])}


@pytest.mark.parametrize(("samples", "streams"), [(2000, True), (400, True), (400, False)])
def test_memory_does_not_grow_with_the_evaluation_set(tmp_path: Path, samples: int, streams: bool) -> None:
    data = [{"input_ids": torch.tensor([row % 2, 0]), "labels": torch.tensor([0, 0])} for row in range(samples)]
    model, options = Wide(), LeanOptions(streaming_metrics=counts if streams else None)
    args = streaming.arguments(tmp_path, per_device_eval_batch_size=8)
    made = Trainer(model, args, compute_metrics=share, lean_options=options)
    assert made.evaluate(data)["eval_accuracy"] == 1
    assert model.batches == samples // 8
    # A batch has 8 samples. The stock loop has joined all before this one.
    assert 8 <= model.most_alive <= 24 if streams else model.most_alive >= samples - 8


def running(found: Any, compute_result: bool) -> dict[str, float]:
    """What the stock `batch_eval_metrics` takes."""
    return share(found)


@pytest.mark.parametrize(
    ("metrics", "given", "says"),
    [
        (counts, {}, "give compute_metrics too"),
        ({"tags": streaming.Tags()}, {"compute_metrics": share}, "with a mapping of streaming_metrics drop it"),
        (counts, {"compute_metrics": running, "batch_eval_metrics": True}, "batch_eval_metrics=True"),
        (counts, {"compute_metrics": share, "prediction_loss_only": True}, "prediction_loss_only=True"),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path: Path, metrics: Any, given: Any, says: str) -> None:
    compute_metrics = given.pop("compute_metrics", None)
    with pytest.raises(ValueError, match=says):
        Trainer(
            streaming.Tagger(),
            streaming.arguments(tmp_path, **given),
            compute_metrics=compute_metrics,
            lean_options=LeanOptions(streaming_metrics=metrics),
        )


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        (True, "give a function of a batch"),
        ({}, "give a function of a batch"),
        ({"tags": counts}, r"streaming_metrics\['tags'\]: function has no update, compute and reset"),
        ({"tags": streaming.Tags}, r"streaming_metrics\['tags'\]"),
        (streaming.Rank(), "Rank: give it a name"),
    ],
)
def test_what_is_no_metric_is_refused_when_the_options_are_built(metrics: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LeanOptions(streaming_metrics=metrics)


@pytest.mark.parametrize(
    ("function", "compute", "error", "says"),
    [
        (lambda batch: 3, share, TypeError, "must return a mapping from name to sum, got int"),
        (lambda batch: {"x": batch.predictions.sum(0)[: len(batch.predictions)]}, dict, ValueError, "one shape"),
        (counts, lambda total: {"loss": 1.0}, ValueError, "loss is a name of the stock evaluation"),
        (counts, lambda total: 1.0, TypeError, "compute_metrics must return a mapping"),
    ],
)
def test_a_bad_metric_is_one_clear_error(tmp_path: Path, function: Any, compute: Any, error: Any, says: str) -> None:
    options = LeanOptions(streaming_metrics=function, log_extra_losses=("kinds",))
    made = Trainer(streaming.Tagger(), streaming.arguments(tmp_path), compute_metrics=compute, lean_options=options)
    with pytest.raises(error, match=says):
        made.evaluate(streaming.rows(6))
    assert made.compute_metrics is compute


def test_a_prediction_step_without_predictions_is_told_so(tmp_path: Path) -> None:
    class Silent(transformers.Trainer):
        def prediction_step(self, *positional: Any, **named: Any) -> Any:
            return super().prediction_step(*positional, **named)[0], None, None

    options = LeanOptions(streaming_metrics={"rank": streaming.Rank()})
    made = lean(Silent)(streaming.Tagger(), streaming.arguments(tmp_path), lean_options=options)
    with pytest.raises(ValueError, match=r"prediction_step of .* returned no predictions"):
        made.evaluate(streaming.rows(6))
