"""What a checkpoint contains: the texts of `vescale-convert inspect` and the page of `vescale-convert report`."""
