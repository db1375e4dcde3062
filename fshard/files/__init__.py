"""Files and folders of checkpoints, their formats and where they lie; nothing here knows of ranks."""
