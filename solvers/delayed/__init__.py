"""Methods whose gradients belong to older weights, and what a rank stashes for them."""
