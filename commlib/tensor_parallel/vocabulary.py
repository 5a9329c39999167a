"""Vocabulary parallelism: embeddings and cross-entropy with words sharded among ranks. [pure]

An embedding: a rank looks up its own words, returns zeros for all others, and the sum over ranks is the result.

Cross-entropy of logits z that are sharded along the words, with target y, label smoothing s, V words in all and class
weights w, which add up to W, is

    loss = a log(sum exp z) - (1 - s) w[y] z[y] - s / V * sum w z      where a = (1 - s) w[y] + s / V * W
    gradient of z: a softmax(z) - (1 - s) w[y] [word is y] - s / V * w

so ranks exchange the maximum (it is subtracted before exp), then, in one message, three sums for each row: of exp z,
of z[y] (zero except on one rank) and of w z. The mean is over the rows' w[y]. Rows with an ignored target count
neither in the loss nor in the mean.
All of it is computed in float32 at least. Source: Shoeybi et al., Megatron-LM (2019); smoothing is over all words, as
in torch.nn.CrossEntropyLoss, whatever the number of ranks.
"""

from __future__ import annotations

from commlib.sharding.sharding import Sharding


def words_of(sharding: Sharding, rank: int, size: int) -> tuple[int, int]:
    """Return the first word of a rank, and the one after its last."""
    ((start, stop),) = sharding.spans(rank, size)
    return start, stop
