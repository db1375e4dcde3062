"""Files and folders of checkpoints, local and remote, and their formats; nothing here knows of ranks."""
