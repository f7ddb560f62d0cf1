"""Links through torch.distributed, for ranks of any launcher."""
