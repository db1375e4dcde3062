"""ZeRO over whole parameters: optimizer state partitioned by rank."""
