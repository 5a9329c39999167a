"""Measuring collectives as nccl-tests does, beside their peers, in turn inside one process: `commlib bench`."""
