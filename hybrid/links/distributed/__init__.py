"""Links over torch.distributed, for ranks of any launcher."""
