"""Plans: which leaves are gathered together, over which axes they are cut, and in which dtype."""
