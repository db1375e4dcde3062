"""Which elements of which leaf lie on which rank."""
