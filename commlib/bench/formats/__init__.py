"""Output formats of other benchmarks, for programs that parse them: `--format nccl` and `--format osu`."""
