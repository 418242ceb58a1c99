"""Questions people ask, as functions that return data; printing is the command line's."""
