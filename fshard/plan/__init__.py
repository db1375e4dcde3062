"""Plans: the units, axes and dtypes of a tree's leaves."""
