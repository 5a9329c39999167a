"""The schedules, a file for each family. Importing this enters them into the table."""

from commlib.pipeline.schedule.plans import (
    breadth_first,
    dualpipe,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    zero_bubble,
)

__all__ = ["breadth_first", "dualpipe", "gpipe", "interleaved", "one_f_one_b", "pipedream", "zero_bubble"]
