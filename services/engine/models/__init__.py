"""Models behind one interface: `general` runs what `transformers` can, through its attention interface."""
