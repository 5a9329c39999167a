"""Diagnosis: what is here (`commlib info`), and what is wrong with it.

facts      what is collected, as data
machine    this host: memory, limits, links
process    this process: packages, cores, launcher, settings
mpi        the MPI library, started here or in a process of its own
network    latency and bandwidth, measured by commlib's own calls
watch      nothing hangs: a time limit that holds inside MPI as well
checks     rules over facts, each with what to type
"""
