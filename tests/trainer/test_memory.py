"""After an out-of-memory error the pieces of a micro-batch give the gradient of the whole, as a stock run shows.

The error is real in type and text and raised by the model when a batch has more samples than it "fits", in the forward
or in the middle of the backward, where some gradients are already there.
"""

import gc
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration, TrainingArguments
from transformers.utils import ModelOutput

from bareloop.trainer import memory
from bareloop.trainer.hf import Trainer, lean
from bareloop.trainer.options import LeanOptions

gc.collect()
gc.freeze()  # accelerate collects garbage in every `train()`, which takes 0.4 s over what is imported

VOCABULARY = 13
CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)


def fail(text: str | None) -> None:
    raise (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if text is None
        else RuntimeError(text)
    )


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        fail(None)


class Tagger(nn.Module):
    """Next-token or same-token classifier with the loss given by `loss`; more than `fits` samples fail."""

    def __init__(self, loss: str, fits: int = 10**9, *, where: str = "forward", text: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.fits, self.where, self.text = loss, fits, where, text
        self.embedding, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.sizes: list[int] = []
        self.accepts_loss_kwargs = loss in ("sum", "ignores the count")

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **ignored: Any) -> Any:
        too_large = len(input_ids) > self.fits
        if self.training:
            self.sizes.append(len(input_ids))
        if too_large and self.where == "forward":
            fail(self.text)
        hidden = self.embedding(input_ids)
        if too_large and torch.is_grad_enabled():  # the head has its gradient when the embedding's fails
            hidden = FailsInBackward.apply(hidden)
        logits = self.head(hidden)
        if self.kind == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        counted = labels.ne(-100)
        if self.kind == "sum" and num_items_in_batch is not None:
            loss = each.sum() / num_items_in_batch
        elif self.kind == "samples":
            loss = (each.view_as(labels).sum(dim=1) / counted.sum(dim=1)).mean()
        elif self.kind == "contrastive":
            loss = each.sum() / counted.sum() + torch.logsumexp(hidden.mean(dim=(1, 2)), dim=0).exp()
        else:
            loss = each.sum() / counted.sum()
        return ModelOutput(loss=loss, logits=logits, kinds={"mean": each.sum() / counted.sum()})


def rows(count: int = 24, *, equal: bool = False) -> list[dict[str, Tensor]]:
    """Rows of 7 tokens with 2 to 7 of them labelled, a different number in each of the neighbours."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for row in range(count):
        tokens = torch.randint(VOCABULARY, (7,), generator=generator)
        labels = tokens.clone()
        if not equal:
            labels[2 + row % 6 :] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def trained(
    trainer: type, folder: Path, model: nn.Module, *, data: Any = None, accumulate: int = 1, **given: Any
) -> Any:
    options: dict[str, Any] = {}
    if "lean_options" in inspect.signature(trainer.__init__).parameters:
        options["lean_options"] = LeanOptions(shrink_on_out_of_memory=True, **given)
    arguments = TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=2,
        learning_rate=0.1,
        optim="sgd",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    made = trainer(model, arguments, train_dataset=data or rows(), **options)
    made.train()
    return made


def assert_same_run(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    pairs = zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True)
    for mine, other in pairs:
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert (mine["epoch"], mine["step"]) == (other["epoch"], other["step"])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", ["sum", "mean", "ignores the count", "shifted", "samples"])
def test_pieces_train_as_the_whole_does_in_a_stock_run(tmp_path: Path, loss: str, accumulate: int) -> None:
    theirs = trained(transformers.Trainer, tmp_path, Tagger(loss), accumulate=accumulate)
    for where in ("forward", "backward"):
        ours = trained(Trainer, tmp_path, Tagger(loss, fits=3, where=where), accumulate=accumulate)
        assert_same_run(ours, theirs)
        assert memory.largest_micro_batch(ours) == 2
        # 8 failed, then 4, and from there on nothing did.
        assert [size for size in ours.model.sizes if size > 3] == [8, 4]


def test_error_texts_of_the_cpu_are_recognised(tmp_path: Path) -> None:
    ours = trained(Trainer, tmp_path, Tagger("mean", fits=5, text=CPU_TEXT))
    assert_same_run(ours, trained(transformers.Trainer, tmp_path, Tagger("mean")))
    assert memory.largest_micro_batch(ours) == 4


def test_a_model_that_fits_trains_to_the_bit_as_in_a_stock_run(tmp_path: Path) -> None:
    ours = trained(Trainer, tmp_path, Tagger("mean"), accumulate=3)
    theirs = trained(transformers.Trainer, tmp_path, Tagger("mean"), accumulate=3)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert memory.largest_micro_batch(ours) is None and set(ours.model.sizes) == {8}


def test_rules_that_the_first_micro_batch_cannot_tell_apart_are_told_apart_later(tmp_path: Path) -> None:
    for loss in ("mean", "samples"):
        data = rows(16, equal=True) + rows(8)
        ours = trained(lean(InOrder), tmp_path, Tagger(loss, fits=2), data=data)
        assert_same_run(ours, trained(InOrder, tmp_path, Tagger(loss), data=data))


class InOrder(transformers.Trainer):
    """Reads the rows in order."""

    def _get_train_sampler(self, *ignored: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def test_whether_the_first_label_counts_is_found_even_where_every_label_has_the_same_loss(tmp_path: Path) -> None:
    for loss in ("mean", "shifted"):
        runs = []
        for trainer, fits in ((Trainer, 3), (transformers.Trainer, 8)):
            model = Tagger(loss, fits)
            nn.init.zeros_(model.head.weight)
            nn.init.zeros_(model.head.bias)
            runs.append(trained(trainer, tmp_path, model))
        assert_same_run(*runs)


def test_the_modes_of_submodules_are_left_as_they_were(tmp_path: Path) -> None:
    class AsItIs(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    model = Tagger("mean", fits=4)
    model.head.eval()
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    made = lean(AsItIs)(model, arguments, lean_options=LeanOptions(shrink_on_out_of_memory=True))
    made.training_step(model, {key: torch.stack([row[key] for row in rows(8)]) for key in ("input_ids", "labels")})
    assert memory.largest_micro_batch(made) == 4
    assert model.training and model.embedding.training and not model.head.training


def test_pieces_without_labels_count_nothing(tmp_path: Path) -> None:
    data = rows(16)
    for row in data[:5] + data[9:13]:
        row["labels"] = torch.full_like(row["labels"], -100)
    ours = trained(Trainer, tmp_path, Tagger("mean", fits=2), data=data)
    assert_same_run(ours, trained(transformers.Trainer, tmp_path, Tagger("mean"), data=data))


def test_t5_accepts_the_count_of_labels_but_takes_the_mean(tmp_path: Path) -> None:
    class Small(T5ForConditionalGeneration):
        fits = 8

        def forward(self, *positional: Any, **named: Any) -> Any:
            if len(named["input_ids"]) > self.fits:
                fail(None)
            return super().forward(*positional, **named)

    def model(fits: int) -> Small:
        torch.manual_seed(0)
        settings = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
        made = Small(T5Config(**settings, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))
        made.fits = fits
        return made

    ours = trained(Trainer, tmp_path, model(3), accumulate=2)
    assert_same_run(ours, trained(transformers.Trainer, tmp_path, model(8), accumulate=2))
    assert memory.largest_micro_batch(ours) == 2


def test_compute_loss_and_training_step_of_a_subclass_are_used(tmp_path: Path) -> None:
    class Own(transformers.Trainer):
        calls = 0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            outputs = model(**inputs)
            return (2 * outputs["loss"], outputs) if return_outputs else 2 * outputs["loss"]

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            self.calls += 1
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()
            return loss.detach()

    ours = trained(lean(Own), tmp_path, Tagger("mean", fits=4))
    theirs = trained(Own, tmp_path, Tagger("mean"))
    assert_same_run(ours, theirs)
    assert ours.calls == 1 + 2 * theirs.calls


def test_a_training_step_that_goes_around_compute_loss_is_told_so(tmp_path: Path) -> None:
    class Around(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = model(**inputs)["loss"]
            loss.backward()
            return loss.detach()

    with pytest.raises(ValueError, match=r"training_step of .*Around does not call compute_loss"):
        trained(lean(Around), tmp_path, Tagger("mean", fits=4))


def test_extra_losses_count_a_split_micro_batch_once(tmp_path: Path) -> None:
    given = {"data": rows(20, equal=True), "accumulate": 3, "log_extra_losses": ("kinds",)}  # 8 + 8 + 4 in a step
    for where in ("forward", "backward"):
        ours = trained(Trainer, tmp_path, Tagger("mean", fits=3, where=where), **given)
        for line in ours.state.log_history[:-1]:  # as many labels in each row: the extra loss is the loss
            assert line["mean"] == pytest.approx(line["loss"], rel=1e-6)


def test_a_loss_that_no_rule_explains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither their sum nor a mean .* lower per_device_train_batch_size"):
        trained(Trainer, tmp_path, Tagger("contrastive", fits=4))


def test_one_sample_that_does_not_fit_is_a_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    class Shrinking(Tagger):
        def forward(self, *positional: Any, **named: Any) -> Any:
            if len(self.sizes) > 4:  # two steps go well
                self.fits = 0 if torch.is_grad_enabled() else 8
            return super().forward(*positional, **named)

    model = Shrinking("mean", fits=4)
    with pytest.raises(RuntimeError, match=r"one sample, so there is nothing left to halve; .*gradient_checkpointing"):
        trained(Trainer, tmp_path, model)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_input_that_has_no_samples_is_named(tmp_path: Path) -> None:
    def collate(batch: Any) -> Any:
        return {**transformers.default_data_collator(batch), "table": torch.zeros(3, 2)}

    class WithTable(transformers.Trainer):
        def __init__(self, *positional: Any, **named: Any) -> None:
            super().__init__(*positional, data_collator=collate, **named)

    with pytest.raises(ValueError, match=r"inputs\['table'\] has shape \(3, 2\), its first dimension is not the 8"):
        trained(lean(WithTable), tmp_path, Tagger("mean", fits=4))


def test_other_errors_pass_and_leave_the_gradients_of_earlier_micro_steps(tmp_path: Path) -> None:
    model = Tagger("mean", fits=4, text="something else")
    model.head.bias.grad = torch.ones(VOCABULARY)
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True),
        lean_options=LeanOptions(shrink_on_out_of_memory=True),
    )
    batch = {key: torch.stack([row[key] for row in rows(8)]) for key in ("input_ids", "labels")}
    with pytest.raises(RuntimeError, match="something else"):
        trainer.training_step(model, batch)
    assert torch.equal(model.head.bias.grad, torch.ones(VOCABULARY)) and model.embedding.weight.grad is None


def test_a_warning_and_the_report_say_what_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="bareloop"):
        made = trained(Trainer, tmp_path, Tagger("mean", fits=4))
    said = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert said == ["out of memory with a micro-batch of 8 samples: going on with 4"]
    assert "at most 4 samples" in str(made.lean_report)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True starts the training anew"),
        ({"optim": "lomo"}, "optim=.lomo. steps during the backward"),
    ],
)
def test_settings_that_exclude_it_are_refused_when_the_trainer_is_built(
    tmp_path: Path, changed: Any, says: str
) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, **changed)
    with pytest.raises(ValueError, match=says):
        Trainer(Tagger("mean"), arguments, lean_options=LeanOptions(shrink_on_out_of_memory=True))


def test_batch_normalisation_is_refused_by_its_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match=r"1 normalises over the micro-batch; use GroupNorm"):
        Trainer(model, arguments, lean_options=LeanOptions(shrink_on_out_of_memory=True))
