"""The command line: one small file per command, nothing heavy imported before a command runs."""
