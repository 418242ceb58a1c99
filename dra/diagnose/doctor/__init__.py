"""`dra doctor`: which step between the hardware and a container is broken, and what to do about it.

Reads only: no file is written, no device node made, no API object changed.
"""
