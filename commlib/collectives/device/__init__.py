"""Paths of collectives for arrays in device memory: NCCL, peer memory within a node, CUDA-aware MPI, staging copies."""
