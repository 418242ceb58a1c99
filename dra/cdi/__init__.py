"""CDI: the spec model and its rules, what a container is given, and the files in the CDI directory."""
