"""Results as other benchmarks print them, for programs that read those: `--format nccl` and `--format osu`."""
