"""Pictures: who holds what of a plan or a state, and the memory and the collectives of a graph."""
