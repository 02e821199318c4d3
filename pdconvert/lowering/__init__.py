"""From checked torch blocks to one MIL program: export once per signature, walk the graph, write constants by name."""
