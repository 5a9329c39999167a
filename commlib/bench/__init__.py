"""`commlib bench`: time collectives as nccl-tests does, in turn with their peers inside one process."""
