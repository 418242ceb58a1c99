"""What the server refuses, with its field paths and reasons."""
