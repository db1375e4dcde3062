"""What a step needs before it runs: memory by purpose, what ranks send, and whether a device has room for it."""
