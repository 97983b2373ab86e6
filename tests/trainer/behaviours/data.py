"""Data: collation, batches, samplers, loaders, streams."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

from behaviours.behaviour import in_area
from behaviours.tasks import (
    Line,
    PretrainedLine,
    Stream,
    line_rows,
    near,
    said,
    text_model,
    text_rows,
    tokenizer,
    trainer,
)

__all__ = ["BEHAVIOURS"]


class Recording(Line):
    """Keeps the x of each batch it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[float]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        self.batches.append(x.tolist())
        return super().forward(x, labels)


def _batches(cls: type[Any], **settings: Any) -> list[list[float]]:
    model = Recording()
    trainer(cls, model, **settings).train()
    return model.batches


def batches_have_the_size_asked_for(cls: type[Any]) -> None:
    """Each device's batch has the size given; the last one holds what is left."""
    sizes = [len(batch) for batch in _batches(cls, train_dataset=line_rows(22), per_device_train_batch_size=4)]
    assert sizes == [4, 4, 4, 4, 4, 2]


def incomplete_batches_can_be_dropped(cls: type[Any]) -> None:
    """dataloader_drop_last leaves out the incomplete last batch, in training and evaluation."""
    settings = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "dataloader_drop_last": True}
    built = trainer(cls, train_dataset=line_rows(22), eval_dataset=line_rows(30), **settings)
    assert len(built.get_train_dataloader()) == 5
    assert len(built.get_eval_dataloader()) == 3
    assert built.train().global_step == 5


def loaders_know_their_total_batch_size(cls: type[Any]) -> None:
    """The loaders of training and evaluation carry the batch size over all processes."""
    built = trainer(cls, per_device_train_batch_size=4, per_device_eval_batch_size=16, eval_dataset=line_rows(8))
    assert built.get_train_dataloader().total_batch_size == 4
    assert built.get_eval_dataloader().total_batch_size == 16


def another_evaluation_set_can_be_loaded(cls: type[Any]) -> None:
    """get_eval_dataloader and get_test_dataloader take any set."""
    built = trainer(cls, eval_dataset=line_rows(8), per_device_eval_batch_size=8)
    assert len(built.get_eval_dataloader(line_rows(40))) == 5
    assert len(built.get_test_dataloader(line_rows(24))) == 3


def evaluation_sets_are_loaded_by_name(cls: type[Any]) -> None:
    """One of several evaluation sets is loaded by its name, anew each time without lasting workers."""
    built = trainer(cls, eval_dataset={"short": line_rows(8), "long": line_rows(40)}, per_device_eval_batch_size=8)
    assert len(built.get_eval_dataloader("short")) == 1
    assert len(built.get_eval_dataloader("long")) == 5
    assert built.get_eval_dataloader("long") is not built.get_eval_dataloader("long")


def lasting_workers_keep_the_evaluation_loader(cls: type[Any]) -> None:
    """With persistent workers the loader of each evaluation set is made once."""
    built = trainer(
        cls,
        eval_dataset={"short": line_rows(8), "long": line_rows(40)},
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
    )
    assert built.get_eval_dataloader("long") is built.get_eval_dataloader("long")
    assert built.get_eval_dataloader("long") is not built.get_eval_dataloader("short")


def every_row_comes_once_an_epoch_in_another_order(cls: type[Any]) -> None:
    """Training shuffles: each epoch is a permutation of the rows, and the next epoch another one."""
    batches = _batches(cls, num_train_epochs=2)
    first, second = (list(chain(*batches[at : at + 4])) for at in (0, 4))
    assert sorted(first) == sorted(second) == sorted(float(row["x"]) for row in line_rows())
    assert first != second


def rows_can_come_in_their_own_order(cls: type[Any]) -> None:
    """train_sampling_strategy="sequential" trains on the rows as they stand."""
    order = list(chain(*_batches(cls, train_sampling_strategy="sequential")))
    assert order == [float(row["x"]) for row in line_rows()]


def _ragged_rows(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"][: 3 + at * 5 % 9]} for at, row in enumerate(text_rows(count))]


def rows_of_similar_length_come_together(cls: type[Any]) -> None:
    """group_by_length starts with the longest row and pads less than shuffling does."""
    widths: dict[str, list[tuple[int, int]]] = {}

    class Padding(DataCollatorWithPadding):
        def __call__(self, features: list[Any]) -> Any:
            batch = super().__call__(features)
            widths.setdefault(strategy, []).append((max(len(row["input_ids"]) for row in features), len(features)))
            return dict(batch) | {"labels": batch["input_ids"]}

    for strategy in ("group_by_length", "random"):
        rows = _ragged_rows(48)
        settings = {"train_sampling_strategy": strategy, "per_device_train_batch_size": 4}
        trainer(cls, text_model(), train_dataset=rows, data_collator=Padding(tokenizer()), **settings).train()
    grouped, shuffled = widths["group_by_length"], widths["random"]
    assert grouped[0][0] == 11
    assert sum(width * rows for width, rows in grouped) < sum(width * rows for width, rows in shuffled)


def lengths_can_be_a_column(cls: type[Any]) -> None:
    """group_by_length reads the lengths of a dataset from length_column_name."""
    rows = [{"x": float(row["x"]), "label": float(row["labels"]), "span": at} for at, row in enumerate(line_rows())]

    def collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([row["x"] for row in rows]), "labels": torch.tensor([row["label"] for row in rows])}

    batches = _batches(
        cls,
        train_dataset=datasets.Dataset.from_list(rows),
        data_collator=collator,
        remove_unused_columns=False,
        train_sampling_strategy="group_by_length",
        length_column_name="span",
    )
    assert batches[0][0] == pytest.approx(rows[-1]["x"])
    assert sorted(chain(*batches)) == pytest.approx(sorted(row["x"] for row in rows))


def batches_can_be_balanced_by_length(cls: type[Any]) -> None:
    """batch_rebalance keeps the number of rows per step and gives long rows smaller micro-batches."""
    sizes: list[tuple[int, int]] = []

    class Padding(DataCollatorWithPadding):
        def __call__(self, features: list[Any]) -> Any:
            batch = super().__call__(features)
            sizes.append((len(features), batch["input_ids"].shape[1]))
            return dict(batch) | {"labels": batch["input_ids"]}

    settings = {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2}
    built = trainer(
        cls,
        text_model(),
        train_dataset=_ragged_rows(24),
        data_collator=Padding(tokenizer()),
        per_device_train_batch_size=4,
        **settings,
    )
    built.train()
    windows = [sizes[at : at + 2] for at in range(0, len(sizes), 2)]
    assert all(sum(rows for rows, _ in window) == 8 for window in windows)
    assert any(rows != 4 for rows, _ in sizes)


def the_sampler_can_be_overridden(cls: type[Any]) -> None:
    """A trainer's own _get_train_sampler decides the order."""

    class Backward(cls):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return list(range(31, -1, -1))

    order = list(chain(*_batches(Backward)))
    assert order == [float(row["x"]) for row in reversed(line_rows())]


class Twice:
    """Two loaders one after the other, without a dataset attribute."""

    def __init__(self, loader: Any, other: Any) -> None:
        self.loaders = (loader, other)

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader


def loaders_can_be_overridden(cls: type[Any]) -> None:
    """A trainer may return any object with a length and batches as its loader."""

    class Doubled(cls):
        def get_train_dataloader(self) -> Any:
            return Twice(super().get_train_dataloader(), super().get_train_dataloader())

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return Twice(super().get_eval_dataloader(eval_dataset), super().get_eval_dataloader(eval_dataset))

    built = trainer(Doubled, Line(), eval_dataset=line_rows(16))
    assert built.train().global_step == 8
    assert built.evaluate()["eval_loss"] == pytest.approx(
        trainer(cls, built.model, eval_dataset=line_rows(16)).evaluate()["eval_loss"]
    )


def a_plain_torch_loader_can_be_returned(cls: type[Any]) -> None:
    """get_train_dataloader may return a torch DataLoader that accelerate has not prepared."""

    class Plain(cls):
        def get_train_dataloader(self) -> Any:
            return DataLoader(line_rows(), batch_size=8)

    assert list(chain(*_batches(Plain))) == [float(row["x"]) for row in line_rows()]


def the_collator_gets_lists_of_rows(cls: type[Any]) -> None:
    """A collator of the user's gets the rows of a batch and returns what the model is called with."""
    sizes = []

    def collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sizes.append(len(rows))
        return {name: torch.tensor([row[name] for row in rows]) for name in ("x", "labels")}

    assert near(_ran(trainer(cls, data_collator=collator)), _ran(trainer(cls)), 0)
    assert sizes == [8, 8, 8, 8]


def _ran(built: Any) -> Any:
    built.train()
    return built


def a_tokenizer_brings_its_padding(cls: type[Any]) -> None:
    """Without a collator a tokenizer given as processing_class pads the batches."""

    class Widths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))
            self.seen: list[tuple[int, ...]] = []

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict:
            self.seen.append(tuple(attention_mask.sum(dim=1).tolist()))
            return {"loss": self.weight * input_ids.sum()}

    rows = [{"input_ids": row["input_ids"]} for row in _ragged_rows(4)]
    model = Widths()
    settings = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 4}
    trainer(cls, model, train_dataset=rows, processing_class=tokenizer(), **settings).train()
    assert model.seen == [(3, 8, 4, 9)]


def columns_can_be_kept(cls: type[Any]) -> None:
    """remove_unused_columns=False hands every column to the model."""

    class Weighted(Line):
        def forward(self, **batch: torch.Tensor) -> dict:
            self.columns = sorted(batch)
            return super().forward(batch["x"], batch["labels"])

    model = Weighted()
    trainer(cls, model, train_dataset=line_rows(extra=0.5), remove_unused_columns=False).train()
    assert {"extra", "labels", "x"} <= set(model.columns)


def a_batch_without_a_column_for_the_model_raises(cls: type[Any]) -> None:
    """Rows that have nothing for the model raise a ValueError instead of training on nothing."""
    with pytest.raises(ValueError):
        trainer(cls, train_dataset=[{"other": 1.0}] * 8).train()
    with pytest.raises(ValueError):
        trainer(cls, train_dataset=datasets.Dataset.from_list([{"other": 1.0}] * 8)).train()


def workers_change_no_result(cls: type[Any]) -> None:
    """Loading in a worker process gives the same weights."""
    assert near(_ran(trainer(cls, dataloader_num_workers=1)), _ran(trainer(cls)), 0)


def nested_batches_reach_the_model(cls: type[Any]) -> None:
    """Batches may hold dictionaries and lists of tensors."""

    class Nested(Line):
        def forward(self, points: dict) -> dict:
            return super().forward(points["x"], points["more"][0])

    def collator(rows: list[dict[str, Any]]) -> dict[str, Any]:
        x, y = (torch.tensor([row[name] for row in rows]) for name in ("x", "labels"))
        return {"points": {"x": x, "more": [y]}}

    nested = trainer(cls, Nested(), data_collator=collator, remove_unused_columns=False)
    assert near(_ran(nested), _ran(trainer(cls, Line())), 0)


def a_stream_trains_for_max_steps(cls: type[Any]) -> None:
    """Data without a length is read in order, again from its start when it ends, until max_steps."""
    batches = _batches(cls, train_dataset=Stream(line_rows(16, extra=1.0)), max_steps=5)
    in_order = [float(row["x"]) for row in line_rows(16)]
    assert list(chain(*batches)) == [*in_order, *in_order, *in_order[:8]]


def a_stream_that_runs_dry_stops_the_training(cls: type[Any]) -> None:
    """A stream that gives nothing any more ends the training with a warning."""
    undispatched = {"dispatch_batches": False}
    built = trainer(cls, train_dataset=Stream(line_rows(16), once=True), max_steps=9, accelerator_config=undispatched)
    with said() as heard:
        assert built.train().global_step == 2
    assert any("at step 2" in message for message in heard)


def a_stream_that_runs_dry_raises_when_dispatched(cls: type[Any]) -> None:
    """Where accelerate hands out the batches of a stream, as it does by default, it raises when there are no more."""
    built = trainer(cls, train_dataset=Stream(line_rows(16), once=True), max_steps=9)
    with pytest.raises(ValueError):
        built.train()
    assert built.state.global_step == 2


def a_stream_is_not_sampled(cls: type[Any]) -> None:
    """The loader of a stream has no sampler of its own."""
    loader = trainer(cls, train_dataset=Stream(line_rows()), max_steps=2).get_train_dataloader()
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.sampler, torch.utils.data.dataloader._InfiniteConstantSampler)


def a_stream_accumulates_what_it_has(cls: type[Any]) -> None:
    """A stream that ends inside a window trains on the batches that it still gave."""
    model = Recording()
    built = trainer(cls, model, train_dataset=Stream(line_rows(40)), max_steps=6, gradient_accumulation_steps=2)
    built.train()
    assert built.state.global_step == 6
    assert all(len(batch) == 8 for batch in model.batches)


def data_of_a_pretrained_model_moves_with_it(cls: type[Any]) -> None:
    """Batches are on the device of the arguments when the model gets them."""

    class Where(PretrainedLine):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            assert x.device == labels.device == self.slope.device
            return super().forward(x, labels)

    built = trainer(cls, Where())
    assert built.args.device == torch.device("cpu")
    built.train()


BEHAVIOURS = in_area(
    "data",
    batches_have_the_size_asked_for,
    incomplete_batches_can_be_dropped,
    loaders_know_their_total_batch_size,
    another_evaluation_set_can_be_loaded,
    evaluation_sets_are_loaded_by_name,
    lasting_workers_keep_the_evaluation_loader,
    every_row_comes_once_an_epoch_in_another_order,
    rows_can_come_in_their_own_order,
    rows_of_similar_length_come_together,
    lengths_can_be_a_column,
    batches_can_be_balanced_by_length,
    the_sampler_can_be_overridden,
    loaders_can_be_overridden,
    a_plain_torch_loader_can_be_returned,
    the_collator_gets_lists_of_rows,
    a_tokenizer_brings_its_padding,
    columns_can_be_kept,
    a_batch_without_a_column_for_the_model_raises,
    workers_change_no_result,
    nested_batches_reach_the_model,
    a_stream_trains_for_max_steps,
    a_stream_that_runs_dry_stops_the_training,
    a_stream_that_runs_dry_raises_when_dispatched,
    a_stream_is_not_sampled,
    a_stream_accumulates_what_it_has,
    data_of_a_pretrained_model_moves_with_it,
)
