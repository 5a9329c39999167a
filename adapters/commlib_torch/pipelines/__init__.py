"""Pipelines of PyTorch modules: modules cut into stages, microbatches between them, and schedules that run both."""
