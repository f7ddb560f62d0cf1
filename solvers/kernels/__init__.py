"""The element-wise work of sub-problems, in torch and as fused kernels under one signature."""
