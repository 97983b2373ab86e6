"""What a difference and its control allow one to say.

The control is A against A in the same turns: what "no difference" looks like on this machine today. An interval that
leaves out "none" is not enough, since it does so for one A/A pair in twenty; the difference must also stand clear of
the control. In simulations of 3 to 12 launches that leaves under 1 % false verdicts.
"""

import math

from bareloop.benchmark.noise import t_quantile
from bareloop.benchmark.paired import Difference

__all__ = ["NEGLIGIBLE_SHARE", "resolution", "saving_status", "speed_verdict"]

NEGLIGIBLE_SHARE = 0.002
"""A saving below this share of a step is none."""


def speed_verdict(difference_log: Difference | None, control_log: Difference | None, equal_within: float = 0.03) -> str:
    """What b is against a: "slower", "faster", "equal" or "undecided"; swapping a and b flips it.

    Slower when the whole interval is above a ratio of 1 and above the control's ratio, and the ratio is above the
    control's interval. Which of two equal scripts is called the first is chance, so the control counts with either
    sign. Equal when the whole interval lies within `equal_within` and the control's interval includes 1.

    Args:
        difference_log: log(time of b / time of a); None for too few launches.
        control_log: The same of a against a; None for too few launches.
        equal_within: Ratios from 1 / (1 + equal_within) to 1 + equal_within are equal for all purposes.

    Raises:
        ValueError: `equal_within` is negative.
    """
    if equal_within < 0:
        raise ValueError(f"equal_within must not be negative, got {equal_within:g}")
    if difference_log is None or control_log is None:
        return "undecided"
    if _clear_of_control(difference_log.estimate, difference_log.low, control_log):
        return "slower"
    if _clear_of_control(-difference_log.estimate, -difference_log.high, control_log):
        return "faster"
    limit = math.log1p(equal_within)
    inside = -limit <= difference_log.low and difference_log.high <= limit
    return "equal" if inside and control_log.low <= 0 <= control_log.high else "undecided"


def saving_status(saving: Difference | None, control: Difference | None, step_s: float) -> str:
    """Status of a cause whose ablation saved `saving` seconds per step: "shown", "counted" or "refuted".

    Shown when the whole interval is above 0 and above the control's estimate, and the estimate is above the control's
    interval. Refuted when the whole interval is below `NEGLIGIBLE_SHARE` of the step, unless the null ablation by
    itself already cost time: then the measuring may have eaten the saving. Else counted, and always without a saving.

    Args:
        saving: Step time with the cause minus step time without it.
        control: The same of the null ablation, which takes nothing away; None never shows anything.
        step_s: Step time with the cause, seconds.

    Raises:
        ValueError: `step_s` is not positive.
    """
    _positive(step_s)
    if saving is None:
        return "counted"
    if control is not None and saving.low > max(0.0, control.estimate) and saving.estimate > control.high:
        return "shown"
    measuring_costs = control is not None and control.high < 0
    return "refuted" if saving.high < NEGLIGIBLE_SHARE * step_s and not measuring_costs else "counted"


def resolution(
    measured: Difference, control: Difference | None = None, *, step_s: float | None = None, power: float = 0.8
) -> float:
    """Share of a step below which a difference can't be seen with these launches (0.05: 5 %).

    A true difference of this size is called with a probability of about `power`. With the half widths h of `measured`
    and hc of the control, the control's estimate c, and s, the standard errors h / t(97.5 %) of both, squares added:

        logs:     exp(|c| + max(h, hc) + t(power) s) - 1
        seconds:  (max(h, c + max(h, hc)) + t(power) s) / step_s

    The first terms are what `speed_verdict` and `saving_status` ask of the estimate, the last is the luck it needs.
    Without a control, one as wide as `measured` is assumed, with the offset that is usual: 0.8 standard errors.

    Args:
        measured: A difference, or a control when nothing else was measured.
        control: A against A, or the null ablation.
        step_s: Step time, for values in seconds; None for logs of ratios.
        power: Probability of being called, 0.5 up to but not including 1.

    Raises:
        ValueError: `step_s` is not positive, or `power` is out of range.
    """
    if not 0.5 <= power < 1:
        raise ValueError(f"power must be at least 0.5 and below 1, got {power:g}")
    half = (measured.high - measured.low) / 2
    error = half / t_quantile(measured.dof)
    if control is None:
        offset, control_half, control_error = math.sqrt(2 / math.pi) * error, half, error
    else:
        offset, control_half = control.estimate, (control.high - control.low) / 2
        control_error = control_half / t_quantile(control.dof)
    widest = max(half, control_half)
    luck = t_quantile(measured.dof, power) * math.hypot(error, control_error)
    if step_s is None:
        return math.expm1(abs(offset) + widest + luck)
    _positive(step_s)
    return (max(half, offset + widest) + luck) / step_s


def _clear_of_control(estimate: float, low: float, control: Difference) -> bool:
    return low > abs(control.estimate) and estimate > max(abs(control.low), abs(control.high))


def _positive(step_s: float) -> None:
    if not step_s > 0:
        raise ValueError(f"step_s must be more than 0 seconds, got {step_s:g}")
