"""State out and in: parameters and optimizer state by name, whole or as DTensors, and parameters made anew."""
