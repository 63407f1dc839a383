"""Training steps that are cut into a stream: batches, losses, metrics and their normalizers, the protocol, FSDP2. Pure torch."""
