"""The only concurrent room: lanes, completions, and the walk of a model along a program."""
