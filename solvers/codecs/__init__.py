"""Codecs: what a tensor travels as between blocks, in fewer bits."""
