"""Describe what a checkpoint contains: the text of `vescale-convert inspect`, the page of `vescale-convert report`."""
