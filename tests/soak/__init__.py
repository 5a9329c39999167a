"""The soak: many random calls on many groups at once, every result checked, and nothing may leak or hang.

    mpiexec -n 4 python -m tests.soak --operations 100000 --seed 1

Every rank draws the same calls from the seed (`script`), so each knows all inputs and expected results (`calls`).
Each thread plays a script of its own on communicators of its own (`player`), with some or all ranks in each. What the
contract leaves open differs between ranks: blocking or started calls, their times, and the order of waits.

    mpiexec -n 2 python -m tests.soak.large

In addition: each verb once on more elements than 32 bits count (`large`), for machines with 9 GiB to spare.
"""

import os

# UCX (in MPICH, and in some builds of Open MPI) remembers every mapping that it received from: 12 KB for each thread
# that is created and ends here, 22 MB in 100,000 operations, which would hide a leak of ours. Set before MPI is loaded.
os.environ.setdefault("UCX_RCACHE_ENABLE", "n")
