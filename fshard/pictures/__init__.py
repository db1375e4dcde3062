"""Pictures of a plan or a state (who holds what), and of a graph's memory and collectives."""
