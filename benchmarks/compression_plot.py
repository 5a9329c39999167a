"""The picture of benchmarks/compression.py: validation loss against seconds, and against bytes sent.

python benchmarks/compression_plot.py RESULT.json FILE.png
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

PEERS = "ddp"  # prefix of the names of peers
LOCAL = "local"  # the contender that sends nothing; only background traffic is counted


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the figures of compression.py into `path` (.png or .svg). One line per contender, ours solid."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    has_bytes = any(value for of in record["figures"].values() for value in of["sent"])
    figure = Figure(figsize=(13 if has_bytes else 8, 5.5), layout="constrained")
    panels = figure.subplots(1, 2 if has_bytes else 1, sharey=True, squeeze=False)[0]
    colours = mpl.color_sequences["tab20"]
    for number, (name, of) in enumerate(record["figures"].items()):
        style = {"color": colours[number % 20], "ls": "--" if name.startswith(PEERS) else "-", "label": name}
        steps, seconds, losses = zip(*of["validation"], strict=True)
        panels[0].plot(seconds, losses, lw=1.5, **style)
        if has_bytes and all(of["sent"]) and name != LOCAL:
            lengths = [after - before for before, after in itertools.pairwise([0, *steps])]
            nbytes = [per_step * count for per_step, count in zip(of["sent"], lengths, strict=True)]
            panels[1].plot([total / 2**20 for total in itertools.accumulate(nbytes)], losses, lw=1.5, **style)
    for panel, label in zip(panels, ("seconds of training", "MiB sent per rank"), strict=False):
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss, nats per byte")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(record["title"], fontsize="medium")
    figure.savefig(path, dpi=120)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
