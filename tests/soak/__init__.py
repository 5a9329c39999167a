"""The soak: many random calls on many groups at once, every result checked, and nothing may leak or hang.

    mpiexec -n 4 python -m tests.soak --operations 100000 --seed 1

Every rank draws the same calls from the seed (`script`), so each knows all inputs and what must come out (`calls`).
Each thread plays a script of its own on communicators of its own (`player`), some or all of the ranks in each. What is
no part of the contract differs from rank to rank: who calls and who starts, when, and in which order it waits.
"""
