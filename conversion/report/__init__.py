"""One page that shows what a checkpoint holds: `vescale-convert report`."""
