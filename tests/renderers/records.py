"""Records as compare and explain make them: transformers' Trainer against a bare loop, GPT-2, two CPU threads.

The counts are those of transformers 5.24; the times are made up and round.
"""

import math
from dataclasses import replace

from bareloop.diagnosis.evidence import (
    Combined,
    Comparison,
    Control,
    Diagnosis,
    Difference,
    Finding,
    MathVerdict,
    SpeedVerdict,
    Timing,
    Unexplained,
    WorkVerdict,
)
from bareloop.trace import (
    Collective,
    Copy,
    Counts,
    Environment,
    FunctionCount,
    Group,
    HostRead,
    Ledger,
    Optimizer,
    Phases,
    Planned,
    ProcessFacts,
    StepFacts,
    Trace,
)

__all__ = ["comparison", "diagnosis", "unequal_comparison"]

TRAINER_PY = "/venv/lib/python3.11/site-packages/transformers/trainer.py"


def environment(framework: str | None) -> Environment:
    packages = {"transformers": "5.24.0", "accelerate": "1.15.0"} if framework else {"transformers": "5.24.0"}
    return Environment(
        python="3.11.9",
        torch="2.13.0",
        packages=packages,
        framework=framework,
        device="cpu",
        device_name="x86_64",
        cores=2,
        threads=2,
        interop_threads=2,
        loader_workers=0,
        resident_bytes=812_000_000,
    )


def ledger(*, samples: float = 4.0, trainer: bool) -> Ledger:
    decay = 0.0 if trainer else 0.01
    return Ledger(
        samples_per_step=samples,
        tokens_per_step=128.0 * samples,
        real_tokens_per_step=112.5 * samples,
        padding_share=0.121,
        labels_per_step=112.5 * samples,
        micro_steps_per_step=1.0,
        forwards_per_step=1.0,
        backwards_per_step=1.0,
        forward_per_backward=1.0,
        planned_steps=500.0,
        planned_passes=1.0,
        plans=(
            Planned(
                quantity="steps",
                value=500.0,
                source="transformers.Trainer state.max_steps"
                if trainer
                else "loader length 500 x range(1) at loop.py:40",
            ),
        ),
        dataset_size=2000,
        trainable_parameters=1_234_432,
        optimizers=(
            Optimizer(
                name="AdamW",
                fused=False,
                foreach=None,
                groups=(Group(learning_rate=5e-5, weight_decay=decay, tensors=28, elements=1_234_432),),
            ),
        ),
        max_grad_norm=1.0 if trainer else None,
        clipped_share=1.0 if trainer else None,
        weight_decay=decay,
        learning_rate=5e-5,
        matmul_dtypes={"float32": 37.0},
    )


def counts(*, trainer: bool) -> Counts:
    reads = (
        HostRead(
            location=f"{TRAINER_PY}:1919",
            function="_run_epoch",
            source="torch.isnan(tr_loss_step)",
            kind="nan_check",
            per_step=2.0,
            phase="other",
            in_user_code=False,
        ),
    )
    return Counts(
        steps=4,
        micro_steps_per_step=1.0,
        ops_per_step=2043.0 if trainer else 1799.0,
        ops_by_phase={"forward": 402.0, "backward": 911.0, "optimizer": 486.0, "other": 244.0 if trainer else 0.0},
        python_calls_per_step=2973.0 if trainer else 1013.0,
        python_calls_by_phase={"forward": 700.0, "optimizer": 190.0, "other": 2083.0 if trainer else 123.0},
        modules=34,
        module_train_calls_per_step=34.0 if trainer else 0.0,
        host_reads=reads if trainer else (),
        collectives=(Collective(op="all_reduce", per_step=1.0, bytes_per_step=None, phase="other"),) if trainer else (),
        copies=(Copy(direction="cast", per_step=1.0, bytes_per_step=4096.0),),
        matmul_dtypes={"float32": 37.0},
        functions=(FunctionCount(file=TRAINER_PY, line=4224, function="Trainer.floating_point_ops", per_step=1.0),),
    )


def step(index: int, *, trainer: bool) -> StepFacts:
    return StepFacts(
        index=index,
        batch="9f2c61aa04be7d2219f2c61aa04be7d2" if trainer else "1b77e04c93aa5f1011b77e04c93aa5f1",
        rows=("9f2c", "61aa"),
        samples=4,
        tokens=512,
        real_tokens=450,
        labels=450,
        forwards=1,
        backwards=1,
        loss=7.01342 if trainer else 7.02011,
        gradient_norm=3.8123,
        applied_gradient_norm=1.0 if trainer else 3.8123,
        max_grad_norm=1.0 if trainer else math.inf,
        learning_rates=(5e-5,),
        parameters=91.2301,
    )


def phases(*, trainer: bool) -> Phases:
    seconds = {
        "data wait": 0.21e-3 if trainer else 0.19e-3,
        "transfer": 0.0,
        "forward": 1.84e-3 if trainer else 1.80e-3,
        "backward": 2.66e-3 if trainer else 2.62e-3,
        "gradient reduction": 0.0,
        "clip": 0.38e-3 if trainer else 0.0,
        "optimizer": 1.31e-3 if trainer else 1.28e-3,
        "scheduler": 0.02e-3,
        "other": 0.98e-3 if trainer else 0.19e-3,
    }
    return Phases(steps=320, step_s=sum(seconds.values()), seconds=seconds, probe_s=0.021e-3)


def trace(script: str, *, trainer: bool) -> Trace:
    work = ledger(trainer=trainer)
    process = ProcessFacts(
        rank=0,
        pid=4711,
        environment=environment("transformers" if trainer else None),
        work=work,
        steps=(step(1, trainer=trainer), step(2, trainer=trainer)),
        counts=counts(trainer=trainer),
    )
    return Trace(
        script=script,
        command=("python", script),
        processes=(process,),
        work=work,
        phases=phases(trainer=trainer),
        startup_s=6.4,
    )


def findings() -> tuple[Finding, ...]:
    def finding(**fields: object) -> Finding:
        common = {"script": "a", "status": "shown", "counts": {}, "changes_math": False, "setting": None}
        return Finding(**{**common, **fields})  # type: ignore[arg-type]

    return (
        finding(
            cause="module_walk_per_micro_step",
            title="Module tree walked in every micro-step",
            evidence="Module.train is called 34 times per step, once for each module, and changes none of them",
            counts={"module_train_calls_per_step": 34.0},
            saving_s_per_step=0.41e-3,
            low=0.32e-3,
            high=0.50e-3,
            fix="No setting exists in transformers 5.24: training_step calls model.train(). Override training_step.",
            location=f"{TRAINER_PY}:1901",
            control_low=-0.07e-3,
            control_high=0.08e-3,
        ),
        finding(
            cause="gradient_clipping_on_one_side",
            title="Gradients clipped on one side only",
            evidence="1 clip_grad_norm_ call per step over 28 tensors with max_norm 1.0; b has none",
            counts={"clip_calls_per_step": 1.0},
            saving_s_per_step=0.37e-3,
            low=0.28e-3,
            high=0.47e-3,
            fix="No setting exists in transformers 5.24: max_grad_norm=0 still computes the norm. Clip in b too.",
            changes_math=True,
            location=f"{TRAINER_PY}:2578",
            control_low=-0.07e-3,
            control_high=0.08e-3,
        ),
        finding(
            cause="flop_count_per_micro_step",
            title="FLOPs counted in every micro-step",
            evidence="floating_point_ops is called once per micro-step and walks 34 modules and 28 parameters",
            counts={"calls_per_step": 1.0},
            saving_s_per_step=0.21e-3,
            low=0.12e-3,
            high=0.30e-3,
            fix="No setting exists in transformers 5.24: override floating_point_ops to return 0.",
            location=f"{TRAINER_PY}:2571",
            control_low=-0.07e-3,
            control_high=0.08e-3,
        ),
        finding(
            cause="host_read_nan_filter",
            title="Loss tested for NaN on the host in every micro-step",
            status="counted",
            evidence="2 host reads per micro-step test the loss for NaN and infinity",
            counts={"host_reads_per_step": 2.0},
            saving_s_per_step=0.02e-3,
            low=-0.05e-3,
            high=0.09e-3,
            setting="logging_nan_inf_filter=False",
            fix="Pass logging_nan_inf_filter=False to TrainingArguments.",
            location=f"{TRAINER_PY}:1919",
            control_low=-0.07e-3,
            control_high=0.08e-3,
        ),
        finding(
            cause="padding_to_maximum",
            title="Samples padded to a fixed maximum",
            script="b",
            status="not_examined",
            evidence="62 of 512 tokens per step are padding; no sample needs the 128 columns",
            counts={"padding_tokens_per_step": 62.0},
            saving_s_per_step=None,
            low=None,
            high=None,
            fix="Pad each batch to its own longest sample, e.g. with DataCollatorWithPadding(padding='longest').",
            location="loop.py:31",
            reason="the budget ended before its turns",
        ),
        finding(
            cause="per_step_progress_bar",
            title="Progress bar drawn in every step",
            status="refuted",
            evidence="tqdm.update is called once per step",
            counts={"calls_per_step": 1.0},
            saving_s_per_step=-0.03e-3,
            low=-0.09e-3,
            high=0.03e-3,
            setting="disable_tqdm=True",
            fix="Pass disable_tqdm=True to TrainingArguments.",
            location=f"{TRAINER_PY}:2602",
        ),
    )


def together() -> Combined:
    """All causes of the Trainer away at once."""
    causes = (
        "module_walk_per_micro_step",
        "gradient_clipping_on_one_side",
        "flop_count_per_micro_step",
        "host_read_nan_filter",
    )
    return Combined(script="a", causes=causes, status="shown", saving_s_per_step=1.02e-3, low=0.88e-3, high=1.16e-3)


def comparison() -> Comparison:
    """Equal work, different math, b faster."""
    return Comparison(
        a=trace("trainer.py", trainer=True),
        b=trace("loop.py", trainer=False),
        work=WorkVerdict(
            verdict="equal",
            differences=(),
            sentence="Equal work: 4 samples and 512 tokens per step, 1 micro-step, on both sides.",
        ),
        math=MathVerdict(
            verdict="different",
            first_difference={"step": 1, "quantity": "batch"},
            differences=(
                Difference(
                    quantity="batch",
                    a="9f2c61aa04be7d2219f2c61aa04be7d2",
                    b="1b77e04c93aa5f1011b77e04c93aa5f1",
                    step=1,
                    note="same samples in the pass, other order: another shuffle",
                ),
                Difference(quantity="loss", a=7.01342, b=7.02011, step=1, note="follows from the batch"),
                Difference(quantity="max_grad_norm", a=1.0, b=None, step=1),
                Difference(quantity="weight_decay", a=0.0, b=0.01, step=1),
            ),
            steps_compared=4,
            sentence="Different math: batches differ from step 1: the same samples in another order, so losses, "
            "gradients and parameters can't be compared; a clips gradients at 1, b does not; "
            "weight decay 0 in a, 0.01 in b.",
        ),
        speed=SpeedVerdict(
            per="step",
            ratio=0.824,
            low=0.792,
            high=0.857,
            verdict="faster",
            control=Control(ratio=1.003, low=0.981, high=1.024),
            launches=6,
            rounds=84,
            steps_per_turn=32,
            a_s_per_step=7.40e-3,
            b_s_per_step=6.10e-3,
            resolution=0.04,
            per_step_ratio=0.824,
            per_sample_ratio=0.824,
            per_token_ratio=0.824,
        ),
        findings=findings(),
        unexplained=Unexplained(s_per_step=-0.31e-3, low=-0.55e-3, high=-0.07e-3, share=0.24),
        combined=(together(),),
        phases={"a": phases(trainer=True), "b": phases(trainer=False)},
        wall_s=117.2,
        budget_s=120.0,
        notes=("the machine was busy: 0.4 of its 2 cores were used by others while turns were timed",),
        version="0.1.0",
    )


def unequal_comparison() -> Comparison:
    """DataParallel takes 4 samples per step against 2, no speed verdict, nothing timed per phase."""
    record = comparison()
    a = replace(record.a, work=ledger(samples=4.0, trainer=True), phases=None)
    b = replace(record.b, work=ledger(samples=2.0, trainer=False), phases=None)
    return replace(
        record,
        a=a,
        b=b,
        work=WorkVerdict(
            verdict="different",
            differences=(
                Difference(quantity="samples_per_step", a=4.0, b=2.0),
                Difference(quantity="wrapper", a="DataParallel", b="none"),
                Difference(quantity="planned_steps", a=500.0, b=1000.0),
                Difference(quantity="tokens_per_step", a=512.0, b=256.0),
            ),
        ),
        math=MathVerdict(verdict="undecided", first_difference=None, differences=()),
        speed=SpeedVerdict(
            per="sample",
            ratio=1.021,
            low=0.951,
            high=1.094,
            verdict="undecided",
            control=Control(ratio=0.997, low=0.941, high=1.052),
            launches=3,
            rounds=21,
            steps_per_turn=16,
            a_s_per_step=11.90e-3,
            b_s_per_step=6.08e-3,
            resolution=0.11,
            per_step_ratio=0.511,
        ),
        findings=(),
        unexplained=None,
        combined=(),
        phases={},
        notes=(),
    )


def diagnosis() -> Diagnosis:
    """explain on the Trainer script."""
    observed = trace("trainer.py", trainer=True)
    return Diagnosis(
        script="trainer.py",
        trace=observed,
        work=observed.work,
        phases=observed.phases,
        counts=observed.counts,
        timing=Timing(
            s_per_step=7.40e-3,
            low=7.28e-3,
            high=7.52e-3,
            launches=6,
            rounds=84,
            steps_per_turn=32,
            control=Control(ratio=1.003, low=0.989, high=1.018),
            resolution=0.02,
        ),
        findings=tuple(finding for finding in findings() if finding.script == "a"),
        combined=(together(),),
        wall_s=98.6,
        budget_s=120.0,
        version="0.1.0",
    )
