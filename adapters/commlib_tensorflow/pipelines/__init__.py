"""Pipelines of Keras models: layers cut into stages, microbatches between them, and schedules that run both."""
