"""Files and folders of checkpoints, local and remote, and their formats; no file of this folder knows of ranks."""
