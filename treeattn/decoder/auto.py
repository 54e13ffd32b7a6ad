"""``scheme="auto"``: what it may be asked for. `fastest` chooses."""

from __future__ import annotations

from treeattn.collectives import parameters
from treeattn.collectives.catalog import Scheme, Selection
from treeattn.errors import ScheduleError

NAME = "auto"
#: For commands that show one schedule.
NOT_NAMED = (
    "auto takes the fastest of many for the ranks of a job: name a schedule, such as hierarchical, or let "
    "treeattn tune find one"
)
ROW = Scheme(NAME, cost="the least of its candidates on a simulated cluster")


def selection(scheme: str) -> Selection | None:
    """What ``auto`` asks for; None for any other scheme. Raises `ScheduleError` for other parameters."""
    name, *assignments = parameters.split(scheme)
    if name.strip() != NAME:
        return None
    given = dict(assignment.partition("=")[::2] for assignment in assignments)
    if set(given) - {"cluster"} or not all(given.values()):
        raise ScheduleError(f"{scheme!r}: auto takes cluster=NAME or cluster=FILE.toml alone")
    return Selection(ROW, tuple(given.items()), scheme)
