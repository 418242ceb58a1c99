"""The API server: the only room that imports `kubernetes`. Objects are dicts, never typed models."""
