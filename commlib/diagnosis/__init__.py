"""Diagnosis: facts about this installation and job (`commlib info`), and the problems found in them.

facts      the collected facts, as data
machine    this host: memory, limits, links
process    this process: packages, cores, launcher, settings
mpi        the MPI library, started in this process or in a separate one
network    latency and bandwidth, measured with commlib's own calls
watch      nothing hangs: a time limit that also holds inside MPI
checks     rules over facts, each with a command to type
"""
