"""Schedules, one file for each family. Importing this package registers them."""

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
