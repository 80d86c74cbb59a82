"""The protocol of ``torch.optim``: optimizers, their lives and their state dicts."""
