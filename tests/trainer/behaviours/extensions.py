"""What people put beside the loop: adapters, noise, compilation, batch sizes that fit, accelerate's settings, searches,
cards, sequence-to-sequence training."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import HPSearchBackend

from behaviours.behaviour import in_area
from behaviours.tasks import (
    VOCABULARY,
    Line,
    PretrainedLine,
    line_rows,
    losses,
    near,
    said,
    text_model,
    text_rows,
    tokenizer,
    trainer,
    weights,
)

__all__ = ["BEHAVIOURS"]


def _ran(built: Any, checkpoint: Any = None) -> Any:
    built.train(resume_from_checkpoint=checkpoint)
    return built


def _lora(*more: str) -> Any:
    config = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    torch.manual_seed(3)
    model = get_peft_model(text_model(), config)
    for name in more:
        model.add_adapter(name, config)
    return model


TEXT = {"train_dataset": text_rows(16), "per_device_train_batch_size": 4, "logging_steps": 1}


def adapters_train_alone(cls: type[Any]) -> None:
    """Of a model with LoRA adapters only these are trained and saved."""
    model = _lora()
    before = weights(model)
    built = _ran(trainer(cls, model, save_steps=4, **TEXT))
    moved = {name for name, value in weights(built).items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_B" in name or "lora_A" in name for name in moved)
    saved = {path.name for path in Path("out/checkpoint-4").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt"} <= saved
    assert "model.safetensors" not in saved


def adapters_resume(cls: type[Any]) -> None:
    """A training of adapters, one or several in the model, resumes to equal weights."""
    for more in ((), ("second",)):
        out = f"out-{len(more)}"
        whole = _ran(trainer(cls, _lora(*more), save_steps=2, output_dir=out, **TEXT))
        resumed = _ran(
            trainer(cls, _lora(*more), save_steps=2, output_dir=f"{out}-again", **TEXT), f"{out}/checkpoint-2"
        )
        assert near(resumed, whole, 0)
        assert losses(resumed) == losses(whole)


def the_best_adapter_is_loaded(cls: type[Any]) -> None:
    """load_best_model_at_end loads the adapter of the best checkpoint."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "eval_dataset": text_rows(4)}
    built = _ran(trainer(cls, _lora(), load_best_model_at_end=True, **settings, **TEXT))
    assert built.evaluate()["eval_loss"] == pytest.approx(built.state.best_metric, rel=1e-6)


def noise_is_added_in_training_only(cls: type[Any]) -> None:
    """neftune_noise_alpha adds noise to the embeddings of training batches, and no longer after training."""
    quiet = text_model(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    noisy = trainer(cls, quiet, neftune_noise_alpha=5.0, max_steps=1, **TEXT)
    plain = trainer(cls, text_model(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), max_steps=1, **TEXT)
    assert losses(_ran(noisy)) != losses(_ran(plain))
    embeddings = noisy.model.get_input_embeddings()
    assert not embeddings._forward_hooks
    noisy.model.train()
    tokens = torch.tensor([[2, 3]])
    assert torch.equal(embeddings(tokens), embeddings(tokens))


def noise_follows_the_seed(cls: type[Any]) -> None:
    """Trainings with noise repeat for the same seed."""
    one, other = (_ran(trainer(cls, text_model(), neftune_noise_alpha=5.0, **TEXT)) for _ in range(2))
    assert losses(one) == losses(other)


def the_model_can_be_compiled(cls: type[Any]) -> None:
    """torch_compile trains and evaluates the compiled model, to the losses of the plain one."""
    settings = {"max_steps": 2, "logging_steps": 1, "eval_dataset": line_rows(8)}
    compiled = _ran(trainer(cls, Line(), torch_compile=True, torch_compile_backend="eager", **settings))
    plain = _ran(trainer(cls, Line(), **settings))
    assert hasattr(compiled.model_wrapped, "_orig_mod") or compiled.model_wrapped is not compiled.model
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-6)
    assert compiled.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


def a_compile_setting_switches_compiling_on(cls: type[Any]) -> None:
    """A backend or mode for compiling implies torch_compile."""
    assert trainer(cls, torch_compile_backend="eager").args.torch_compile
    assert trainer(cls, torch_compile_mode="default").args.torch_compile_backend == "inductor"


class OutOfMemory(transformers.TrainerCallback):
    """Raises what CUDA raises for batches of 8 or more."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.train_batch_size >= 8:
            raise RuntimeError("CUDA out of memory.")


def a_batch_size_that_fits_is_found(cls: type[Any]) -> None:
    """auto_find_batch_size starts again with a smaller batch after an out-of-memory error."""
    built = trainer(cls, auto_find_batch_size=True, callbacks=[OutOfMemory()], max_steps=3)
    built.train()
    assert built.state.global_step == 3
    assert built._train_batch_size == built.state.train_batch_size == 7


def a_batch_size_is_not_searched_unasked(cls: type[Any]) -> None:
    """Without auto_find_batch_size an out-of-memory error reaches the caller."""
    with pytest.raises(RuntimeError, match="out of memory"):
        _ran(trainer(cls, callbacks=[OutOfMemory()]))


def the_batch_size_found_is_resumed(cls: type[Any]) -> None:
    """Resuming with auto_find_batch_size goes on with the batch size of the checkpoint."""
    _ran(trainer(cls, auto_find_batch_size=True, callbacks=[OutOfMemory()], max_steps=2, save_steps=1))
    built = trainer(cls, auto_find_batch_size=True, max_steps=3, save_steps=1)
    assert built._train_batch_size == 8
    assert _ran(built, True)._train_batch_size == 7


def running_out_of_memory_in_evaluation_is_told(cls: type[Any]) -> None:
    """An out-of-memory error of an evaluation does not shrink the training batch."""

    class Hungry(PretrainedLine):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            if not self.training:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(x, labels)

    settings = {"auto_find_batch_size": True, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": line_rows(8)}
    with pytest.raises(RuntimeError, match="per_device_eval_batch_size"):
        _ran(trainer(cls, Hungry(), **settings))


def _accelerate(cls: type[Any], config: Any) -> tuple[Any, ...]:
    accelerator = trainer(cls, accelerator_config=config).accelerator
    return (
        accelerator.split_batches,
        accelerator.dispatch_batches,
        accelerator.even_batches,
        accelerator.use_seedable_sampler,
    )


def accelerate_is_set_up_from_the_arguments(cls: type[Any]) -> None:
    """accelerator_config is a dictionary, a JSON file or an object; what is left out has its default."""
    assert _accelerate(cls, None) == (False, None, True, True)
    settings = {"split_batches": True, "dispatch_batches": True, "even_batches": False, "use_seedable_sampler": False}
    Path("config.json").write_text(json.dumps(settings))
    for config in (settings, "config.json", AcceleratorConfig(**settings)):
        assert _accelerate(cls, config) == (True, True, False, False)
    assert _accelerate(cls, {"split_batches": True}) == (True, None, True, True)


def accelerate_can_set_the_accumulation(cls: type[Any]) -> None:
    """num_steps of accelerate's settings is the accumulation, unless the arguments have one too, which is refused."""
    config = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    assert trainer(cls, accelerator_config=config).train().global_step == 2
    with pytest.raises(ValueError, match="num_steps"):
        trainer(cls, accelerator_config=config, gradient_accumulation_steps=4)


def gradients_can_be_synchronised_each_time(cls: type[Any]) -> None:
    """sync_each_batch changes no result on one process."""
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    settings = {"gradient_accumulation_steps": 2}
    assert near(_ran(trainer(cls, accelerator_config=config, **settings)), _ran(trainer(cls, **settings)), 0)


def a_class_is_no_setting_of_accelerate(cls: type[Any]) -> None:
    """accelerator_config refuses a class in place of an object."""
    with pytest.raises(NotImplementedError):
        trainer(cls, accelerator_config=AcceleratorConfig)


def a_state_made_beforehand_is_used(cls: type[Any]) -> None:
    """use_configured_state needs an Accelerator that was made before, and then trains with it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError):
        trainer(cls, accelerator_config={"use_configured_state": True})
    Accelerator(cpu=True)
    built = trainer(cls, accelerator_config={"use_configured_state": True})
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True)
    assert built.train().global_step == 4


def model_init_gets_the_trial(cls: type[Any]) -> None:
    """model_init with one parameter is called with the trial, and with None outside a search."""
    trials: list[Any] = []

    def made(trial: Any) -> Line:
        trials.append(trial)
        return Line()

    trial = SimpleNamespace(number=1, params={"learning_rate": 0.2})
    built = trainer(cls, model_init=made)
    with patch("transformers.integrations.hp_params", lambda trial: trial.params):
        built.train(trial=trial)
    assert trials == [None, trial]
    assert built.state.trial_params == {"learning_rate": 0.2}


def a_trial_sets_arguments(cls: type[Any]) -> None:
    """In a search the values of a trial become arguments, and the run has its own folder."""
    built = trainer(cls, model_init=lambda: Line(), save_steps=2, logging_steps=1)
    built.hp_search_backend = HPSearchBackend.OPTUNA
    built.hp_space = lambda trial: trial.params
    built.hp_name = lambda trial: f"try-{trial.number}"
    trial = SimpleNamespace(number=3, params={"learning_rate": 0.5, "per_device_train_batch_size": 16})
    with patch("transformers.integrations.hp_params", lambda trial: trial.params):
        built.train(trial=trial)
    assert built.args.learning_rate == 0.5
    assert built.state.global_step == 2
    assert built.state.is_hyper_param_search
    assert Path("out/try-3/checkpoint-2/model.safetensors").is_file()


def a_search_needs_a_library(cls: type[Any]) -> None:
    """hyperparameter_search says what to install where no library for it is there, and needs model_init."""
    built = trainer(cls, model_init=lambda: Line())
    if not any(backend.is_available() for backend in ALL_HYPERPARAMETER_SEARCH_BACKENDS.values()):
        with pytest.raises(RuntimeError, match="optuna"):
            built.hyperparameter_search()
    assert set(ALL_HYPERPARAMETER_SEARCH_BACKENDS) == set(HPSearchBackend)


def a_card_describes_the_training(cls: type[Any]) -> None:
    """create_model_card writes settings, losses and tags into README.md without a hub."""
    built = _ran(trainer(cls, logging_steps=2, eval_strategy="steps", eval_steps=2, eval_dataset=line_rows(8)))
    built.create_model_card(model_name="a-line", tags=["tiny"], language="en")
    card = Path("out/README.md").read_text()
    assert "a-line" in card
    assert "- tiny" in card
    assert re.search(r"learning_rate: 0\.1", card)
    assert re.search(r"\| *[\d.]+ *\| *1\.0 *\| *4 *\|", card), card


def special_tokens_are_aligned(cls: type[Any]) -> None:
    """Training gives the model's configs the tokenizer's special tokens; building alone does not."""
    model = text_model(bos_token_id=5, eos_token_id=5)
    words = tokenizer(bos_token="w7")
    collator = trainer(cls).data_collator
    built = trainer(cls, model, processing_class=words, data_collator=collator, max_steps=1, **TEXT)
    assert model.config.eos_token_id == 5
    with said():
        built.train()
    assert (model.config.eos_token_id, model.config.bos_token_id, model.config.pad_token_id) == (1, 7, 0)
    assert model.generation_config.eos_token_id == [1, 5]


def caches_are_off_in_training(cls: type[Any]) -> None:
    """The model's cache of keys and values is off unless the arguments ask for it."""
    assert trainer(cls, text_model()).model.config.use_cache is False
    assert trainer(cls, text_model(), use_cache=True).model.config.use_cache is True


def a_model_placed_by_hand_is_taken(cls: type[Any]) -> None:
    """A model with a device map onto the CPU trains."""
    model = PretrainedLine()
    model.hf_device_map = {"slope": "cpu", "intercept": "cpu"}
    assert trainer(cls, model).train().global_step == 4


def _t5() -> T5ForConditionalGeneration:
    torch.manual_seed(2)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    return T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0))


def _translating(cls: type[Any], **settings: Any) -> Any:
    words, model = tokenizer(), _t5()
    defaults = {"predict_with_generate": True, "eval_dataset": text_rows(6, 5), "train_dataset": text_rows(8, 5)}
    collator = transformers.DataCollatorForSeq2Seq(words, model=model)
    return trainer(
        cls,
        model,
        arguments=Seq2SeqTrainingArguments,
        processing_class=words,
        data_collator=collator,
        **(defaults | settings),
    )


def generated_text_is_evaluated(cls: type[Any]) -> None:
    """predict_with_generate hands generated tokens of up to generation_max_length to compute_metrics, in training too."""
    tokens: list[Any] = []

    def note(prediction: Any) -> dict[str, float]:
        tokens.append(prediction.predictions)
        return {"rows": len(prediction.predictions)}

    built = _translating(cls, compute_metrics=note, eval_strategy="epoch", generation_max_length=7)
    built.train()
    assert built.state.log_history[0]["eval_rows"] == 6
    assert tokens[0].dtype.kind == "i"
    assert (tokens[0][:, 7:] == 0).all()


def several_sequences_a_row_are_kept(cls: type[Any]) -> None:
    """Several generated sequences a row all come back."""
    built = _translating(cls, compute_metrics=lambda prediction: {"rows": len(prediction.predictions)})
    config = GenerationConfig(max_new_tokens=3, num_beams=2, num_return_sequences=2, pad_token_id=0, eos_token_id=1,
                              decoder_start_token_id=0)  # fmt: skip
    assert built.evaluate(generation_config=config)["eval_rows"] == 12


def a_bad_generation_config_is_refused(cls: type[Any]) -> None:
    """A generation config that contradicts itself is refused when the trainer is built."""
    with pytest.raises(ValueError):
        _translating(cls, generation_config=GenerationConfig(do_sample=False, top_p=0.9))


BEHAVIOURS = (
    *in_area("adapters", adapters_train_alone, adapters_resume, the_best_adapter_is_loaded),
    *in_area(
        "beside the loop",
        noise_is_added_in_training_only,
        noise_follows_the_seed,
        the_model_can_be_compiled,
        a_compile_setting_switches_compiling_on,
        a_batch_size_that_fits_is_found,
        a_batch_size_is_not_searched_unasked,
        the_batch_size_found_is_resumed,
        running_out_of_memory_in_evaluation_is_told,
        accelerate_is_set_up_from_the_arguments,
        accelerate_can_set_the_accumulation,
        gradients_can_be_synchronised_each_time,
        a_class_is_no_setting_of_accelerate,
        a_state_made_beforehand_is_used,
        model_init_gets_the_trial,
        a_trial_sets_arguments,
        a_search_needs_a_library,
        a_card_describes_the_training,
        special_tokens_are_aligned,
        caches_are_off_in_training,
        a_model_placed_by_hand_is_taken,
    ),
    *in_area(
        "sequence to sequence",
        generated_text_is_evaluated,
        several_sequences_a_row_are_kept,
        a_bad_generation_config_is_refused,
        base=Seq2SeqTrainer,
    ),
)
