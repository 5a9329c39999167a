"""Vocabulary: look up, and be judged by, words that are divided among ranks. [pure]

An embedding: a rank looks up the words that it has, gives zeros for all others, and the sum over ranks is the whole.

Cross-entropy of logits z that are divided along the words, with target y, label smoothing s, V words in all and class
weights w, which add up to W, is

    loss = a log(sum exp z) - (1 - s) w[y] z[y] - s / V * sum w z      where a = (1 - s) w[y] + s / V * W
    gradient of z: a softmax(z) - (1 - s) w[y] [word is y] - s / V * w

so ranks exchange the maximum (it is subtracted before exp), then, in one message, three sums for each row: of exp z,
of z[y] (zero but on one rank) and of w z. The mean is over the rows' w[y]. Rows whose target is to be ignored count
neither in the loss nor in the mean.
All of it is computed in float32 at least. Source: Shoeybi et al., Megatron-LM (2019); smoothing is over all words, as
torch.nn.CrossEntropyLoss has it, whatever the number of ranks.
"""

from __future__ import annotations

from commlib.sharding.sharding import Sharding


def words_of(sharding: Sharding, rank: int, size: int) -> tuple[int, int]:
    """Return the first word of a rank, and the one after its last."""
    ((start, stop),) = sharding.spans(rank, size)
    return start, stop
