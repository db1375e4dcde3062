"""The command line: `fshard COMMAND ...`, and `python -m fshard COMMAND ...`."""
