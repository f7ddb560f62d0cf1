"""Methods whose gradients are of older weights, and what a rank stashes for them."""
