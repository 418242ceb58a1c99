"""The command line: parse, call, print. Imports stand inside functions."""
