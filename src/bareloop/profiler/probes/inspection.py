"""The counting run of a process: first steps, then the counting windows one after the other, then its facts.

Nothing is timed here, so the windows may cost what they like.
"""

import os
from typing import TYPE_CHECKING, Any

from bareloop.profiler.probes import plan, surroundings
from bareloop.profiler.probes.calls import CallsWindow
from bareloop.profiler.probes.ops import OpsWindow
from bareloop.trace import Counts, Ledger, ProcessFacts, StepFacts, encode

if TYPE_CHECKING:
    from bareloop.profiler.probes.agent import Agent

__all__ = ["Inspection", "mean"]


def mean(values: list[Any]) -> float | None:
    """Mean of the values; None when there are none or one could not be observed."""
    return None if not values or any(value is None for value in values) else sum(values) / len(values)


class Inspection:
    """Runs the counting windows and collects the facts."""

    def __init__(self, agent: "Agent") -> None:
        self.agent = agent
        model = max(agent.roots.roots.values(), key=lambda root: sum(1 for _ in root.modules()), default=None)
        self.model = model
        self.steps = agent.settings["window_steps"]
        self._windows = [OpsWindow(agent.clock.name), CallsWindow(agent.clock.name, model)]
        self._done: list[Any] = []
        self._left = 0
        self._frame: Any = None

    def advance(self, frame: Any) -> bool:
        """Called at each boundary, with the frame that is stepping; True when all windows are over."""
        if self._left:
            self._left -= 1
            self._windows[len(self._done)].step_ended()
            if self._left:
                return False
            window = self._windows[len(self._done)]
            window.stop()
            self._done.append(window.result(self.steps))
        if len(self._done) == len(self._windows):
            self._frame = frame
            return True
        self._left = self.steps
        self._windows[len(self._done)].start()
        return False

    def message(self) -> dict[str, Any]:
        """Everything that was observed, as JSON values."""
        from bareloop.profiler.probes.agent import rank_and_world

        rank, world = rank_and_world()
        steps = [step for step in self.agent.steps if not step.skipped] or self.agent.steps
        parameters = [p for o in self.agent.optimizers.values() for group in o.param_groups for p in group["params"]]
        environment = surroundings.observe_environment(parameters, self.agent.train_loader, self._frame)
        facts = ProcessFacts(
            rank=rank,
            pid=os.getpid(),
            environment=environment,
            work=self._ledger(steps, world),
            steps=tuple(self.agent.steps),
            counts=self._counts(steps),
            notes=tuple(self._done[1].notes),
        )
        return {"facts": encode(facts), "optimizers": len(self.agent.calls)}

    def _ledger(self, steps: list[StepFacts], world: int) -> Ledger:
        samples, micro_steps = mean([s.samples for s in steps]), mean([s.micro_steps for s in steps])
        planned = plan.observe_plan(
            self._frame, self.agent.train_loader, micro_steps or 1.0, None if samples is None else samples * world
        )
        optimizers = list(self.agent.optimizers.values())
        clips = [s for s in steps if s.max_grad_norm is not None]
        bit = [s for s in clips if (s.gradient_norm or 0.0) > (s.max_grad_norm or 0.0)]
        return Ledger(
            samples_per_step=samples,
            tokens_per_step=mean([s.tokens for s in steps]),
            real_tokens_per_step=mean([s.real_tokens for s in steps]),
            padding_share=padding_share(steps),
            labels_per_step=mean([s.labels for s in steps]),
            micro_steps_per_step=micro_steps,
            forwards_per_step=mean([s.forwards for s in steps]),
            backwards_per_step=mean([s.backwards for s in steps]),
            forward_per_backward=self._forward_per_backward(),
            planned_steps=planned.planned_steps,
            planned_passes=planned.planned_passes,
            plans=planned.plans,
            dataset_size=planned.dataset_size,
            world_size=world,
            wrapper="none" if self.model is None else surroundings.observe_wrapper(self.model),
            trainable_parameters=surroundings.trainable_parameters(optimizers, self.model),
            optimizers=tuple(surroundings.observe_optimizer(o, self.agent.cycle.per_step(id(o))) for o in optimizers),
            max_grad_norm=clips[0].max_grad_norm if clips else None,
            clipped_share=len(bit) / len(steps) if clips else None,
            weight_decay=surroundings.weight_decay(optimizers),
            learning_rate=surroundings.learning_rate(optimizers),
            autocast=self.agent.roots.autocast,
            matmul_dtypes=self._done[0].matmul_dtypes,
            skipped_steps=sum(step.skipped for step in self.agent.steps),
        )

    def _forward_per_backward(self) -> float | None:
        """Forward calls per call outside backward, of the module that is recomputed most."""
        calls = self.agent.roots.inner_calls.values()
        ratios = [(outside + inside) / outside for outside, inside in calls if outside]
        return max(ratios, default=None)

    def _counts(self, steps: list[StepFacts]) -> Counts:
        ops, calls = self._done
        return Counts(
            steps=self.steps,
            micro_steps_per_step=mean([s.micro_steps for s in steps]) or 1.0,
            ops_per_step=calls.ops_per_step,
            ops_by_phase=calls.ops_by_phase,
            host_reads=ops.host_reads,
            collectives=ops.collectives,
            copies=ops.copies,
            matmul_dtypes=ops.matmul_dtypes,
            python_calls_per_step=calls.python_calls_per_step,
            python_calls_by_phase=calls.python_calls_by_phase,
            modules=calls.modules,
            module_train_calls_per_step=calls.module_train_calls_per_step,
            module_train_in_every_step=calls.module_train_in_every_step,
            functions=calls.functions,
            builtins=calls.builtins,
        )


def padding_share(steps: list[StepFacts]) -> float | None:
    """Share of padding among all tokens of these steps; None when padding could not be told."""
    tokens, real = [s.tokens for s in steps], [s.real_tokens for s in steps]
    if not steps or any(value is None for value in tokens + real) or not sum(tokens):  # type: ignore[arg-type]
        return None
    return 1.0 - sum(real) / sum(tokens)  # type: ignore[arg-type]
