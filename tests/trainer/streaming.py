"""Models, metrics and data of the tests of evaluation, and the two ranks that run them as `python streaming.py`."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import EvalPrediction, TrainingArguments
from transformers.utils import ModelOutput

from bareloop.trainer.hf import Trainer
from bareloop.trainer.options import LeanOptions

VOCABULARY = 11


class Tagger(nn.Module):
    """Tags tokens; returns a second output of another shape where it is told to, as T5 returns its encoder's states."""

    def __init__(self, *, states: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.states = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY), states
        self.steps = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.embedding(input_ids)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        self.steps += self.training
        kinds = {"fit": loss}
        if int(os.environ.get("RANK", "0")) == 1 and self.steps % 2:
            kinds["only_on_rank_1"] = 0 * loss.detach() + self.steps
        states = {"states": hidden[:, :2]} if self.states else {}
        return ModelOutput(loss=loss, logits=logits, **states, kinds=kinds)


def rows(count: int) -> list[dict[str, Tensor]]:
    """`count` rows of 5 tokens, 1 to 5 of them labelled."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for row in range(count):
        labels = torch.randint(VOCABULARY, (5,), generator=generator)
        labels[1 + row % 5 :] = -100
        made.append({"input_ids": torch.randint(VOCABULARY, (5,), generator=generator), "labels": labels})
    return made


class Streamed(IterableDataset):
    def __init__(self, count: int) -> None:
        self.rows = rows(count)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.rows)


def sums(batch: EvalPrediction) -> dict[str, Tensor]:
    """Counts that add up: right tags, labels, a confusion matrix, and the sum of a float."""
    logits = first(batch.predictions)
    counted = batch.label_ids != -100
    tags, labels = logits.argmax(-1)[counted], batch.label_ids[counted]
    pairs = torch.bincount(labels * VOCABULARY + tags, minlength=VOCABULARY**2)
    return {
        "right": (tags == labels).sum(),
        "labels": counted.sum(),
        "pairs": pairs.view(VOCABULARY, VOCABULARY),
        "margin": logits.softmax(-1).amax(-1)[counted].sum(),
    }


def from_sums(total: Mapping[str, Any]) -> dict[str, float]:
    pairs = total["pairs"]
    f1 = 2 * pairs.diagonal() / (pairs.sum(0) + pairs.sum(1)).clamp(min=1)
    return {
        "accuracy": total["right"] / total["labels"],
        "f1": f1.double().mean().item(),
        "margin": total["margin"] / total["labels"],
    }


def from_everything(prediction: EvalPrediction) -> dict[str, float]:
    """The oracle: the same metrics as people compute them, from all predictions at once."""
    logits, labels = torch.as_tensor(first(prediction.predictions)), torch.as_tensor(prediction.label_ids)
    return from_sums({key: value if value.ndim else value.item() for key, value in _exact(logits, labels).items()})


def _exact(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    found = sums(EvalPrediction(logits, labels))
    counted = labels != -100
    found["margin"] = logits.softmax(-1).amax(-1)[counted].double().sum()
    return found


def first(predictions: Any) -> Any:
    return predictions[0] if isinstance(predictions, (tuple, list)) else predictions


class Rank:
    """A metric of one's own that is no sum: the median, over the labels, of the rank of the right tag."""

    def __init__(self) -> None:
        self.ranks: list[Tensor] = []

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        counted = labels != -100
        logits, labels = predictions[counted], labels[counted]
        self.ranks.append((logits > logits.gather(1, labels[:, None])).sum(1))

    def compute(self) -> dict[str, float]:
        ranks = torch.cat(self.ranks).double()
        return {"median": ranks.median(), "labels": float(len(ranks))}

    def reset(self) -> None:
        self.ranks = []


class Tags(torchmetrics.classification.MulticlassAccuracy):
    """torchmetrics wants classes in the second dimension."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, average="micro", ignore_index=-100)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        super().update(predictions.transpose(1, 2), labels)


def objects(prediction: EvalPrediction) -> dict[str, float]:
    """The oracle of `Rank` and `Tags`, from all predictions at once."""
    logits, labels = first(prediction.predictions), prediction.label_ids
    counted = labels != -100
    right = np.take_along_axis(logits[counted], labels[counted][:, None], 1)
    ranks = np.sort((logits[counted] > right).sum(1))
    return {
        "rank_median": float(ranks[(len(ranks) - 1) // 2]),
        "rank_labels": float(counted.sum()),
        "tags": float((logits[counted].argmax(-1) == labels[counted]).mean()),
    }


def arguments(folder: Path | str, **changed: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_eval_batch_size": 4,
        "per_device_train_batch_size": 4,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        "max_steps": 4,
        "logging_steps": 2,
    }
    return TrainingArguments(**settings | changed)


def trainer(folder: Path | str, kind: str, model: nn.Module | None = None, data: Any = None, **changed: Any) -> Any:
    """A trainer that computes the metrics as `kind` says: "sums", "objects" (both lean), or a stock one's oracle."""
    model = Tagger(states=True) if model is None else model
    given = {"args": arguments(folder, **changed), "train_dataset": rows(16), "eval_dataset": data}
    ignored = {"log_extra_losses": ("kinds",)}
    if kind == "sums":
        options = LeanOptions(streaming_metrics=sums, **ignored)
        return Trainer(model, compute_metrics=from_sums, lean_options=options, **given)
    if kind == "objects":
        options = LeanOptions(streaming_metrics={"rank": Rank(), "tags": Tags()}, **ignored)
        return Trainer(model, lean_options=options, **given)
    oracle = {"stock sums": from_everything, "stock objects": objects}[kind]
    return transformers.Trainer(model, compute_metrics=oracle, **given)


def evaluated(folder: Path | str, kind: str, data: Any, **changed: Any) -> dict[str, float]:
    """Metrics of `data`, less the clock's."""
    stock = kind.startswith("stock")
    metrics = trainer(folder, kind, **changed).evaluate(data, ignore_keys=["kinds"] if stock else None)
    clock = ("runtime", "per_second", "preparation_time")
    return {name: value for name, value in metrics.items() if not name.endswith(clock)}


DATA = {
    # by name: how it is made; batches of 4 on one process and 8 on two
    "fills its last batch": lambda: rows(32),
    "leaves copies on both ranks": lambda: rows(18),
    "leaves nothing but copies on rank 1": lambda: rows(19),
    "smaller than a batch": lambda: rows(3),
    "of unknown length": lambda: Streamed(21),
}


def main(folder: Path, rank: int) -> None:
    """One of two ranks: evaluates every data set with every kind, trains once, and writes what it found."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", store, timedelta(seconds=60), world_size=2, rank=rank)
    found: dict[str, Any] = {"trained": []}
    for name, make in DATA.items():
        for kind in ("sums", "objects", "stock sums", "stock objects"):
            found[f"{name}: {kind}"] = evaluated(folder, kind, make())
    made = trainer(folder, "sums")
    made.train()
    found["trained"] = made.state.log_history
    (folder / f"found_{rank}").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may still hold work of a model that the interpreter would take down


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
