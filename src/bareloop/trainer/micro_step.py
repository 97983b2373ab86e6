"""One forward and backward of the trainer, with everything that can be decided beforehand decided.

Does what `Trainer.training_step`, `_prepare_inputs` and `compute_loss` of transformers do, in the same order and with
the same ops, less those that change nothing: a division by one, a multiplication by one process, a new container for
what is in a plain dictionary already. Where a user's class or object overrides one of them, that one is called.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import unwrap_peft_model

from bareloop.trainer.walk import Walk

__all__ = ["MicroStep", "micro_step_of", "without_cpu_index"]

MicroStep = Callable[[nn.Module, Any, Any], Tensor]
"""(model, batch, counted labels of the window or None) -> detached loss[]; the gradient is added to the model's."""

_Inputs = Callable[[Any], Any]
_Loss = Callable[[nn.Module, Any, Any], Tensor]


def micro_step_of(trainer: Any, walk: Walk, overridden: Callable[[str], str | None]) -> MicroStep:
    """What `trainer.training_step` does, for the trainer as it is now.

    Args:
        walk: of the model that is trained.
        overridden: who overrides a method of the stock trainer; None: nobody.
    """
    if overridden("_prepare_context_parallel_inputs"):
        return functools.partial(transformers.Trainer.training_step, trainer)
    inputs_of = _inputs_of(trainer, overridden)
    loss_of = _loss_of(trainer, walk.model, overridden)
    backward = _backward_of(trainer)
    contexts = [overridden(name) for name in ("compute_loss_context_manager", "autocast_smart_context_manager")]
    if any(contexts):
        loss_of = _in_the_users_context(trainer, loss_of)
    enter_training = walk.enter_training
    scaled_always, scaled_when_counted = _scaling(trainer)
    copies_loss = _writes_to_its_loss(trainer, walk.model, overridden)

    def micro_step(model: nn.Module, batch: Any, count: Any) -> Tensor:
        enter_training()
        loss = loss_of(model, inputs_of(batch), count)
        if loss.ndim and loss.numel() != 1:
            raise ValueError(
                f"The loss has the shape {list(loss.shape)}: the model or compute_loss is to return one number, as the "
                "entry `loss` of its outputs or the first of them"
            )
        if not (scaled_always or (scaled_when_counted and count is not None)):
            micro_steps = trainer.current_gradient_accumulation_steps
            if micro_steps != 1:
                loss = loss / micro_steps
        backward(loss)
        return loss.detach().clone() if copies_loss else loss.detach()

    return micro_step


def _writes_to_its_loss(trainer: Any, model: nn.Module, overridden: Callable[[str], str | None]) -> bool:
    """Whether the tensor of a loss may be written to later: by the user's code, or by the replay of a CUDA graph."""
    by_user = bool(overridden("compute_loss")) or trainer.compute_loss_func is not None
    return by_user or trainer.args.torch_compile or hasattr(model, "_orig_mod")


def _scaling(trainer: Any) -> tuple[bool, bool]:
    """Whether the loss is over the whole window already: (always, whenever the labels were counted)."""
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga), False
    return trainer.compute_loss_func is not None, bool(trainer.model_accepts_loss_kwargs)


def _inputs_of(trainer: Any, overridden: Callable[[str], str | None]) -> _Inputs:
    """batch -> what `compute_loss` gets, on the device: a new dictionary for a batch that is one."""
    if overridden("_prepare_inputs") or overridden("_prepare_input"):
        return lambda batch: trainer._prepare_inputs(batch)
    device = without_cpu_index(trainer.args.device)
    prepare, prepare_value = trainer._prepare_inputs, trainer._prepare_input
    may_unpack = not overridden("compute_loss") and not trainer.lean_options.log_extra_losses

    def inputs_of(batch: Any) -> Any:
        # A user's compute_loss gets the container that the collator made; the model gets keywords either way.
        values = batch if type(batch) is dict else batch.data if may_unpack and type(batch) is BatchEncoding else None
        if not values:
            return prepare(batch)
        return {
            name: value.to(device) if isinstance(value, Tensor) else prepare_value(value)
            for name, value in values.items()
        }

    return inputs_of


def without_cpu_index(device: torch.device) -> torch.device:
    """`device`, as tensors name it: accelerate calls the CPU of a process "cpu:1", to which `.to` copies every time."""
    return torch.device("cpu") if device.type == "cpu" else device


def _backward_of(trainer: Any) -> Callable[[Tensor], None]:
    accelerator = trainer.accelerator
    if type(accelerator) is not Accelerator or "backward" in vars(accelerator):
        return accelerator.backward
    scaler = accelerator.scaler
    if scaler is None:
        return _backward
    return lambda loss: scaler.scale(loss).backward()


def _backward(loss: Tensor) -> None:
    loss.backward()


def _in_the_users_context(trainer: Any, loss_of: _Loss) -> _Loss:
    def within(model: nn.Module, inputs: Any, count: Any) -> Tensor:
        with trainer.compute_loss_context_manager():
            return loss_of(model, inputs, count)

    return within


def _loss_of(trainer: Any, model: nn.Module, overridden: Callable[[str], str | None]) -> _Loss:
    """(model, inputs, count) -> loss[] with its graph, as `compute_loss` of the stock trainer computes it."""
    if overridden("compute_loss") or trainer.lean_options.log_extra_losses:
        return lambda model, inputs, count: trainer.compute_loss(model, inputs, num_items_in_batch=count)
    accepts = bool(trainer.model_accepts_loss_kwargs)
    processes = _processes_in_the_mean(trainer)
    if trainer.compute_loss_func is not None:
        finish = _by_function(trainer)
    elif trainer.label_smoother is not None:
        finish = _by_smoother(trainer, model)
    else:
        finish = None

    by_function = trainer.compute_loss_func is not None

    def loss_of(model: nn.Module, inputs: Any, count: Any) -> Tensor:
        if by_function and inputs.get("labels") is None:  # the stock method warns
            stock: Callable[..., Any] = transformers.Trainer.compute_loss
            return stock(trainer, model, inputs, num_items_in_batch=count)
        labels = inputs.pop("labels", None) if finish is not None else None
        if count is not None and accepts:
            inputs = {**inputs, "num_items_in_batch": count}
        outputs = model(**inputs)
        loss = _models_loss(outputs, inputs) if finish is None else finish(outputs, labels, inputs, count)
        if processes != 1 and count is not None:
            loss *= processes
        return loss

    return loss_of


def _processes_in_the_mean(trainer: Any) -> int:
    """Times the loss counts, because the gradient is averaged over processes and the labels are counted over them."""
    counts_labels = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func
    if not (trainer.args.average_tokens_across_devices and counts_labels):
        return 1
    return trainer.accelerator.num_processes // trainer.get_tp_size()


def _by_function(trainer: Any) -> Callable[[Any, Any, Any, Any], Tensor]:
    def finish(outputs: Any, labels: Any, inputs: Any, count: Any) -> Tensor:
        return trainer.compute_loss_func(outputs, labels, num_items_in_batch=count)

    return finish


def _by_smoother(trainer: Any, model: nn.Module) -> Callable[[Any, Any, Any, Any], Tensor]:
    unwrapped = trainer.accelerator.unwrap_model(model)
    is_peft = unwrap_peft_model(unwrapped) is not unwrapped
    plain: Any = unwrapped.base_model.model if is_peft else unwrapped
    shifts = {"shift_labels": True} if plain._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else {}
    smoother = trainer.label_smoother

    def finish(outputs: Any, labels: Any, inputs: Any, count: Any) -> Tensor:
        if labels is None:
            return _models_loss(outputs, inputs)
        return smoother(outputs, labels, num_items_in_batch=count, **shifts)

    return finish


def _models_loss(outputs: Any, inputs: Any) -> Tensor:
    if not isinstance(outputs, dict):
        return outputs[0]
    if "loss" not in outputs:
        raise ValueError(
            f"The model returned no loss, only {', '.join(outputs)}, for the inputs {', '.join(inputs)}: give the "
            "batches the labels that its forward takes, or pass compute_loss_func"
        )
    return outputs["loss"]
