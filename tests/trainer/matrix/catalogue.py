"""The matrix: every setting in which stock and lean must do the same, for one process and for two."""

from matrix.around import AROUND
from matrix.corners import CORNERS
from matrix.ranks import RANKS
from matrix.settings import Setting
from matrix.training import TRAINING
from matrix.tuning import TUNING
from matrix.users import USERS

__all__ = ["ONE_PROCESS", "TWO_PROCESSES"]

ONE_PROCESS: tuple[Setting, ...] = (*TRAINING, *AROUND, *USERS, *CORNERS, *TUNING)

TWO_PROCESSES: tuple[Setting, ...] = RANKS
