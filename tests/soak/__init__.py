"""The soak: many random calls on many groups at once, every result checked, and nothing may leak or hang.

    mpiexec -n 4 python -m tests.soak --operations 100000 --seed 1

Every rank draws the same calls from the seed (`script`), so each knows all inputs and what must come out (`calls`).
Each thread plays a script of its own on communicators of its own (`player`), some or all of the ranks in each. What is
no part of the contract differs from rank to rank: who calls and who starts, when, and in which order it waits.

    mpiexec -n 2 python -m tests.soak.large

Beside it: each verb once on more elements than 32 bits count (`large`), by whoever has 9 GiB to spare.
"""

import os

# UCX (in MPICH, and in some builds of Open MPI) remembers every mapping that a message came from: 12 KB for each thread
# that comes and goes here, 22 MB in 100,000 operations, which would hide a leak of ours. Set before MPI is loaded.
os.environ.setdefault("UCX_RCACHE_ENABLE", "n")
