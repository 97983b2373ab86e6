"""The ablations that reach into a training transformers.Trainer: for some steps, and not before or after them."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bareloop.diagnosis.causes import cause

transformers = pytest.importorskip("transformers")
TRAINER = "transformers/trainer.py"


def trainer(folder, callbacks):
    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (16, 8))]
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    model = transformers.GPT2LMHeadModel(config)
    return transformers.Trainer(model=model, args=args, train_dataset=rows, callbacks=callbacks)


class Logs(transformers.TrainerCallback):
    """Counts what is logged in training."""

    def __init__(self, calls):
        self.calls = calls

    def on_log(self, args, state, control, logs=None, **kwargs):
        """One log, unless it is the summary at the end."""
        self.calls["logs"] += "loss" in logs


CASES = {
    "nan_check_per_step": ("isnan", {"trainer_filter": True}),
    "flop_count_per_micro_step": ("num_parameters", {"functions": [[TRAINER, "Trainer.floating_point_ops"]]}),
    "logging_per_step": ("logs", {"functions": [[TRAINER, "Trainer.log"]]}),
    "module_tree_walk_per_micro_step": ("train", {}),
    "gradient_clipping_differs": ("norms", {"device": "cpu"}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("code", CASES)
def test_steps_three_to_five_are_without_the_cause(code, tmp_path, monkeypatch):
    counted, data = CASES[code]
    calls = dict.fromkeys(["isnan", "num_parameters", "logs", "train", "norms"], 0)

    def counting(owner, name, key):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            calls[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counting(torch, "isnan", "isnan")
    counting(transformers.PreTrainedModel, "num_parameters", "num_parameters")
    counting(torch.nn.LayerNorm, "train", "train")
    counting(torch.nn.utils, "clip_grad_norm_", "norms")
    # The first step makes the number that later ones are given: it must not be left over from another run.
    monkeypatch.setattr("bareloop.diagnosis.causes.flop_count_per_micro_step._LAST", {})
    steps, entered = [], []

    def after_step(optimizer, args, kwargs):
        steps.append(calls[counted])
        calls[counted] = 0
        if len(steps) == 2:
            entered.append(cause(code).ablate(data))
            entered[0].__enter__()
        if len(steps) == 5:
            entered[0].__exit__(None, None, None)

    subject = trainer(tmp_path, [Logs(calls)])
    hook = register_optimizer_step_post_hook(after_step)
    try:
        subject.train()
    finally:
        hook.remove()
    present = [bool(count) for count in steps]
    if code == "flop_count_per_micro_step":
        assert present == [True, True, True, False, False, True, True, True]
    elif code == "logging_per_step":  # a step is logged after its optimizer step
        assert present == [False, True, False, False, False, True, True, True]
    else:
        assert present == [True, True, False, False, False, True, True, True]
    assert subject.args.logging_nan_inf_filter is True and subject.state.logging_steps == 1
