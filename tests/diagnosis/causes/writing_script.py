"""A user's module for test_logging_per_step: the ways to write in each step."""

import logging
import sys

from tqdm import tqdm

logger = logging.getLogger("writing_script")


def write_all(file, bar, step):
    """A print, a write, a record and a redraw."""
    print("step", step)
    file.write(f"{step}\n")
    file.flush()
    sys.stdout.write(f"to stdout {step}\n")
    logger.warning("record %d", step)
    logger.error("error %d", step)
    bar.set_postfix(step=step)


def train(file, at_step):
    """Three steps; `at_step(step)` is called at the end of each."""
    bar = tqdm(range(3), file=file)
    for step in bar:
        write_all(file, bar, step)
        at_step(step)
