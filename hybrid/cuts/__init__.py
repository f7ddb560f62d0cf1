"""Units into blocks: what they cost and where to cut."""
